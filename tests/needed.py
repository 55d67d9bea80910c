"""Programs that a test needs and that Python's packages do not bring."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

EVERYWHERE = f"{os.environ.get('PATH', '')}:/usr/sbin"


def needed(program: str, package: str) -> str:
    """The path of a program. Without it, a test is skipped on a laptop, and fails in CI."""
    found = shutil.which(program, path=EVERYWHERE)
    if found is None:
        absent(f"there is no {program} here: apt install {package}")
    return found


def absent(sentence: str) -> NoReturn:
    """End a test that cannot run here; the sentence says what would install what it needs."""
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)
