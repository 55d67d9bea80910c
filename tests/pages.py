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

from tests.programs import ROOT


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
