"""What tests share is in modules that hold no test."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_module_imports_from_a_module_of_tests() -> None:
    for file in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            else:
                continue
            for name in names:
                held = TESTS.parent / Path(*name.split(".")).with_suffix(".py")
                assert not (held.name.startswith("test_") and held.exists()), f"{file}: {name}"
