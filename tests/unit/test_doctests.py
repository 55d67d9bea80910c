"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import saf

ROOT = Path(saf.__file__).parents[1]
# Alembic's scripts, in an installed package, run only inside Alembic, Django's modules only in a
# configured project, and __main__ runs the command
FILES = [
    file
    for package in ("saf", "saf_demo")
    for file in (ROOT / package).rglob("*.py")
    if not {"migrations", "django", "__main__.py"} & {*file.relative_to(ROOT).parts}
]
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0
