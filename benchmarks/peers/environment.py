"""Where the peers live: an environment each, in the cache, and files of Debian's packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "saf-peers"
PACKAGES = {
    "pgq": ("postgresql-15-pgq3", Path("usr/share/postgresql/15/contrib/pgq_pl_only.sql")),
    "spark_jdbc": ("libpostgresql-jdbc-java", Path("usr/share/java/postgresql.jar")),
}


class NotInstalled(Exception):
    """A peer could not be installed; the table says why."""


def python(requires: Sequence[str]) -> Path:
    """The Python of an environment with these packages, made if it is not there; ours if none.

    Raises:
        NotInstalled: pip could not.
    """
    if not requires:
        return Path(sys.executable)
    folder = CACHE / sha256("\n".join(requires).encode()).hexdigest()[:16]
    found = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        _run(found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requires)
        (folder / "complete").touch()
    return found


def out_of_package(peer: str) -> Path:
    """What a peer needs out of a package of Debian's, which is not installed.

    Raises:
        NotInstalled: apt could not.
    """
    package, file = PACKAGES[peer]
    found = CACHE / file.name
    if not found.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _run("apt-get", "download", "-qq", package, cwd=folder)
            (archive,) = Path(folder).glob("*.deb")
            _run("dpkg", "-x", archive, folder)
            (Path(folder) / file).rename(found)
    return found


def _run(*command: str | Path, cwd: str | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotInstalled(f"{error.filename} is not here") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstalled(lines[-1] if lines else f"{command[0]} failed on {sys.platform}")
