"""What a killed run of the tests has left in memory goes with the next run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tests import memory


def test_a_sweep_deletes_what_nobody_holds_and_nothing_else(tmp_path: Path) -> None:
    names = {"saf-aaaaaaaa": 0, "saf-held0000": 0, "saf-young000": 1, "saf-test-abc": 0, "else": 0}
    for name, young in names.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data").write_text("x")
        if not young:
            os.utime(folder, (0, 0))
    held = os.open(tmp_path / "saf-held0000", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    memory.sweep(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == names.keys() - {"saf-aaaaaaaa"}
    os.close(held)
    os.utime(tmp_path / "saf-held0000", (0, 0))
    memory.sweep(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"saf-young000", "saf-test-abc", "else"}
