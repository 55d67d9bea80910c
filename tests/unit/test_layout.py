"""The house: which rooms there are, and that arrows between them run one way."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import saf
from saf.destinations.kinds import OURS
from saf.sources.kinds import OURS as SOURCES

HERE = Path(saf.__file__).parent
SPARK = {"pyspark", "py4j"}

ROOMS = {path.name for path in HERE.iterdir() if (path / "__init__.py").is_file()}


FACES = {".".join(path.parent.relative_to(HERE.parent).parts) for path in HERE.rglob("__init__.py")}
"""Folders. What one says of itself is for its modules too, and it hands on what they have."""


@cache
def modules() -> dict[str, ast.Module]:
    """All modules of saf by their dotted names."""
    found = {}
    for path in HERE.rglob("*.py"):
        parts = path.relative_to(HERE.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module, *, for_types: bool = False) -> tuple[str, ...]:
    """What a module imports, at its top and in its functions."""
    return _imports(tree, for_types)


@cache
def _imports(tree: ast.Module, for_types: bool) -> tuple[str, ...]:
    return tuple(_imported(tree, for_types=for_types))


def _imported(tree: ast.Module, *, for_types: bool) -> Iterator[str]:
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else node.module


def room(name: str) -> str:
    """The folder that a module is in; of one directly in saf, itself."""
    parts = name.split(".")
    return name if len(parts) < 2 or parts[1] not in ROOMS else parts[1]


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Those that can be reached from themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [*graph.get(start, ())]
        while ahead:
            if (one := ahead.pop()) not in seen:
                seen.add(one)
                ahead += graph.get(one, ())
        return seen

    return [[one, *sorted(graph[one])] for one in sorted(graph) if one in reached(one)]


def test_few_modules_are_directly_in_saf() -> None:
    assert len([*HERE.glob("*.py")]) <= 13


def test_no_module_imports_itself_by_others_not_even_inside_a_function() -> None:
    graph = {
        name: {one for one in imports(tree) if one in modules()} - {name, "saf"}
        for name, tree in modules().items()
        if name != "saf"
    }
    assert circles(graph) == []


def test_no_module_needs_the_types_of_one_that_imports_it() -> None:
    """But for what a folder says of itself, such as the settings of a kind of destination."""
    graph = {
        name: {one for one in imports(tree, for_types=True) if one in modules()} - {name, *FACES}
        for name, tree in modules().items()
        if name not in FACES
    }
    assert circles(graph) == []


def test_arrows_between_rooms_run_one_way() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules().items():
        if name == "saf":
            continue
        for one in imports(tree):
            if one in modules() and one != "saf" and room(one) != room(name):
                graph[room(name)].add(room(one))
    assert circles(graph) == []


def test_only_the_room_spark_knows_spark() -> None:
    knows = {
        room(name)
        for name, tree in modules().items()
        if SPARK & {one.partition(".")[0] for one in imports(tree, for_types=True)}
    }
    assert knows == {"spark"}


def test_the_engine_knows_neither_those_who_drive_it_nor_spark() -> None:
    known = {room(one) for n, t in modules().items() if room(n) == "engine" for one in imports(t)}
    assert not known & {"forwarding", "spark", "receiving", "operating", "cli"}


def test_nobody_outside_of_its_folder_knows_a_kind_of_destination() -> None:
    """But for what makes settings, or databases, by itself: the registry, the test kit.

    A source stores as the kind ``postgresql`` does, and uses the client of its own kind. The other
    end of the kind ``https`` stores as the kind ``postgresql`` does, and a stream of Spark appends
    to tables as the kind ``delta`` does.
    """
    for kind in OURS:
        folder = f"saf.destinations.{kind}"
        knows = {
            room(name)
            for name, tree in modules().items()
            if not name.startswith(folder)
            for one in imports(tree, for_types=True)
            if f"{one}.".startswith(f"{folder}.")
        }
        assert knows <= {"cli", "sources", "spark", "testing", "webhooks"}, kind
        assert "sources" not in knows or kind == "postgresql" or kind in SOURCES
        assert "spark" not in knows or kind == "delta"
        assert "webhooks" not in knows or kind in ("https", "postgresql")
    by_hand = [n for n, t in modules().items() if "saf.destinations.postgresql" in imports(t)]
    assert sorted(by_hand) == [
        "saf.testing.cycle",
        "saf.webhooks.deliveries",
    ]


def test_saf_does_not_know_the_demos() -> None:
    knows = {
        name
        for name, tree in modules().items()
        if any(one.startswith("saf_demo") for one in imports(tree, for_types=True))
    }
    assert knows == set()


def test_receiving_knows_no_dialogs() -> None:
    known = {
        room(one) for n, t in modules().items() if room(n) == "receiving" for one in imports(t)
    }
    assert "dialogs" not in known


def test_each_room_says_what_belongs_there() -> None:
    for name in ROOMS:
        said = ast.get_docstring(modules()[f"saf.{name}"]) or ""
        assert len(said) > 40, f"saf/{name}/__init__.py says too little"
