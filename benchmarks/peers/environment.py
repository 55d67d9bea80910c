"""Where the peers live: a virtual environment each, in the cache, and PgQ's SQL from Debian."""

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
PGQ_PACKAGE = "postgresql-15-pgq3"
PGQ_SQL = Path("usr/share/postgresql/15/contrib/pgq_pl_only.sql")


class NotInstalled(Exception):
    """A peer could not be installed; the table says why."""


def python(requires: Sequence[str]) -> Path:
    """The Python of an environment with these packages, made if it is not there.

    Raises:
        NotInstalled: pip could not.
    """
    folder = CACHE / sha256("\n".join(requires).encode()).hexdigest()[:16]
    found = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        _run(found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requires)
        (folder / "complete").touch()
    return found


def pgq_sql() -> Path:
    """PgQ's PL-only install, out of its package, which is not installed.

    Raises:
        NotInstalled: apt could not.
    """
    found = CACHE / PGQ_SQL.name
    if not found.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _run("apt-get", "download", "-qq", PGQ_PACKAGE, cwd=folder)
            (package,) = Path(folder).glob("*.deb")
            _run("dpkg", "-x", package, folder)
            (Path(folder) / PGQ_SQL).rename(found)
    return found


def _run(*command: str | Path, cwd: str | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotInstalled(f"{error.filename} is not here") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstalled(lines[-1] if lines else f"{command[0]} failed on {sys.platform}")
