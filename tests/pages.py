"""Pages whose commands are run: the blocks of code that they mark to be tested.

<!-- test: shell -->
```sh
saf status
```
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from saf.broker.services import create_service
from saf.database import Dsn
from tests.pipeline import connect
from tests.programs import ROOT, activated, configuration, run


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / "docs" / name).read_text()


def blocks(text: str, kind: str) -> list[str]:
    """The code that a page marks with ``<!-- test: kind -->``, in its order."""
    return re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", text, re.DOTALL)


def unmarked_shells(text: str) -> list[str]:
    """The blocks of commands that a page does not mark: nobody runs them."""
    return re.findall(r"(?<!-->\n)```sh\n(.*?)```", text, re.DOTALL)


def clone(folder: Path, environment: Path) -> Path:
    """The files of this repository in another folder, with this environment as its .venv.

    ``environment``: the folder of a virtual environment, in which everything is installed.
    """
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    venv = folder / ".venv"
    venv.mkdir()
    for part in environment.iterdir():
        if part.name != ".installed":
            (venv / part.name).symlink_to(part)
    (venv / ".installed").touch()
    return folder


def prepared(folder: Path, app: Dsn, mom: Dsn) -> Path:
    """A folder with a saf.toml, from ``shop`` to ``mom``, where the service billing lives."""
    configuration(folder / "saf.toml", {"shop": app}, {"mom": mom})
    with connect(mom) as store:
        create_service(store, "billing")
    return folder


def shell(script: str, folder: Path, app: Dsn, mom: Dsn, *, path: str = "") -> str:
    """What bash says, and saf in it; each command has to succeed."""
    done = run(
        ["bash", "-euxo", "pipefail", "-c", script],
        env={
            "PATH": path or activated(),
            "SHOP_DSN": app.conninfo,
            "MOM_DSN": mom.conninfo,
        },
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
