"""Private attributes of libraries are used in one module, and exist in the installed releases."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

import saf
from saf.database.pinned import PINNED, Pinned

DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Public names that begin with an underscore: named tuples', and `os._exit`."""


def has(owner: type, attribute: str) -> bool:
    """Whether a class has an attribute, or its objects get it when they are made."""
    assigned = re.compile(rf"\bself\.{attribute}\b[^=\n]*=[^=]")
    sources = (inspect.getsource(sys.modules[kind.__module__]) for kind in owner.__mro__[:-1])
    return hasattr(owner, attribute) or any(map(assigned.search, sources))


@pytest.mark.parametrize("pinned", PINNED, ids=lambda pinned: pinned.owner)
def test_a_library_has_the_private_attributes_that_saf_uses(pinned: Pinned) -> None:
    module, _, name = pinned.owner.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    gone = [attribute for attribute in pinned.attributes if not has(owner, attribute)]
    assert not gone, (
        f"{pinned.owner} of {pinned.distribution} {version(pinned.distribution)} has no "
        f"{', '.join(gone)}: saf.database.pinned uses it, and was tested with {pinned.tested}"
    )


@cache
def modules() -> dict[str, ast.Module]:
    here = Path(saf.__file__).parent
    return {str(path.relative_to(here)): ast.parse(path.read_text()) for path in here.rglob("*.py")}


def own_names() -> set[str]:
    """Names that saf itself defines, as functions, classes or attributes."""
    found = set()
    for tree in modules().values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
    return found


def test_no_other_module_uses_a_private_attribute_of_a_library() -> None:
    known = own_names() | DOCUMENTED
    used = [
        f"saf/{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in modules().items()
        if name != "database/pinned.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[a-z]", node.attr)
        and node.attr not in known
    ]
    assert not used, f"move them to saf/database/pinned.py: {used}"


def test_a_missing_attribute_is_named() -> None:
    gone = Pinned("psycopg", "3.3.9", "psycopg.Connection", ("_no_such_attribute",))
    with pytest.raises(AssertionError, match=r"psycopg\.Connection of psycopg .* has no _no_such"):
        test_a_library_has_the_private_attributes_that_saf_uses(gone)
