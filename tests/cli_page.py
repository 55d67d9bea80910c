"""docs/reference/cli.md: every command with its arguments, options and exit codes.

python -m tests.cli_page          # writes the page
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import typer
from typer.models import ArgumentInfo

import saf.errors
from saf.cli import app
from saf.errors import SafError
from tests.docstrings import one_line

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"

HEAD = """# Commands

This page is for operators and for authors of scripts. It lists every command of `saf`, with its
arguments and options, like `saf COMMAND --help`. `python -m tests.cli_page` writes it from the
code.

Commands read saf.toml from the path in `--config`, else in `$SAF_CONFIG`, else from the current
folder; [saf.toml](settings.md) lists its settings. With `--json`, a command writes one line of JSON
for programs. Events go to standard error: as text on a terminal, elsewhere as lines of JSON.

## Exit codes

A command that fails shows the reason in one sentence. The error determines the exit code:

| code | errors |
| --- | --- |
| 0 | none: done, nothing to do, or stopped on request |
"""

INTERRUPTED = "| 130 | none: Ctrl-C, if the command has nothing in hand to finish |\n"


def errors() -> Iterator[type[SafError]]:
    """All of the package, in the order of their definition."""
    for one in vars(saf.errors).values():
        if isinstance(one, type) and issubclass(one, SafError):
            yield one


def exit_codes() -> str:
    """A row for each code, with the errors that end a command with it."""
    by_code: dict[int, list[str]] = {}
    for error in errors():
        by_code.setdefault(error.exit_code, []).append(f"`{error.__name__}`")
    rows = [f"| {code} | {', '.join(names)} |\n" for code, names in sorted(by_code.items())]
    return "".join(rows) + INTERRUPTED


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, or a group of commands, and the words that call it."""

    path: tuple[str, ...]
    help: str
    call: Callable[..., Any] | None
    """None: a group, whose commands follow."""

    @property
    def parameters(self) -> list[Parameter]:
        """Its arguments, and then its options, in their order."""
        if self.call is None:
            return []
        hints = get_type_hints(self.call, include_extras=True)
        signature = inspect.signature(self.call).parameters
        found = [
            Parameter(name=name, type=hints[name].__origin__, info=info, default=one.default)
            for name, one in signature.items()
            for info in hints[name].__metadata__
            if not info.hidden
        ]
        return sorted(found, key=lambda one: not one.is_argument)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An argument or an option of a command."""

    name: str
    type: Any
    info: Any
    """What `typer.Argument` or `typer.Option` has returned."""
    default: Any

    @property
    def is_argument(self) -> bool:
        """Whether it has no name on the command line."""
        return isinstance(self.info, ArgumentInfo)

    @property
    def required(self) -> bool:
        """Whether the command does not work without it."""
        return self.default is inspect.Parameter.empty

    @property
    def many(self) -> bool:
        """Whether it may be said several times."""
        return get_origin(_some(self.type)) in (list, tuple)

    @property
    def words(self) -> str:
        """Its names on the command line, or of an argument what stands for it."""
        if self.is_argument:
            return self.takes
        # in an Annotated, the first name is where the default would be
        names = [one for one in (self.info.default, *(self.info.param_decls or ())) if one]
        said = [one for one in names if isinstance(one, str) and one.startswith("-")]
        return " ".join(said) or "--" + self.name.replace("_", "-")

    @property
    def takes(self) -> str:
        """What its value is; an empty text of a flag."""
        type_ = _some(self.type)
        if self.many:
            type_ = get_args(type_)[0]
        if self.info.metavar:
            return str(self.info.metavar)
        if isinstance(type_, type) and issubclass(type_, Enum):
            return ", ".join(one.value for one in type_)
        if get_origin(type_) is Literal:
            return ", ".join(get_args(type_))
        if self.is_argument:
            return self.name.upper()
        return {bool: "", int: "NUMBER", float: "NUMBER", Path: "PATH", UUID: "UUID"}.get(
            type_, "TEXT"
        )


def _some(annotation: Any) -> Any:
    """``T`` of ``T | None``."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not type(None))
    return annotation


def commands(of: typer.Typer = app, path: tuple[str, ...] = ("saf",)) -> Iterator[Command]:
    """Each command, and each group before its commands."""
    if of.registered_callback and of is app:
        said = inspect.getdoc(of.registered_callback.callback) or ""
        yield Command(path=path, help=said, call=of.registered_callback.callback)
    for one in of.registered_commands:
        assert one.callback is not None
        name = one.name or one.callback.__name__.replace("_", "-")
        said = one.help or inspect.getdoc(one.callback) or ""
        yield Command(path=(*path, name), help=said, call=one.callback)
    for group in of.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        words = (*path, str(group.name))
        yield Command(path=words, help=str(inner.info.help), call=None)
        yield from commands(inner, words)


def page() -> str:
    """The page."""
    written = [HEAD + exit_codes()]
    for command in commands():
        words = " ".join(command.path)
        said = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
        level = "###" if len(command.path) > 2 else "##"
        written.append(f"{level} {words}\n")
        if command.call is not None:
            written.append(f"`{_usage(command)}`\n")
        written.append(f"{said}\n")
        rows = [_row(one) for one in command.parameters]
        if rows:
            written.append("| | | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(written)


def _usage(command: Command) -> str:
    """The command with its arguments and those of its options that it needs."""
    said = list(command.path)
    for one in command.parameters:
        word = one.words if one.is_argument else f"{one.words} {one.takes}"
        if one.required:
            said.append(word + ("…" if one.many and not word.endswith("…") else ""))
        elif one.is_argument:
            said.append(word if _is_one(one) else f"[{word}{'…' if one.many else ''}]")
    return " ".join([*said, "[OPTIONS]"])


def _is_one(one: Parameter) -> bool:
    """Whether the words of an argument are one thing, named by one word or by two."""
    return one.is_argument and " | " in one.takes


def _row(one: Parameter) -> str:
    takes = f"`{one.takes}`" if one.takes else ""
    name = "argument" if one.is_argument else f"`{one.words}`"
    said = [one_line(one.info.help or "")]
    low, high = one.info.min, one.info.max
    if low is not None:
        said.append(f"From {low}." if high is None else f"{low} to {high}.")
    if one.required:
        said.append("Required.")
    elif isinstance(one.default, (int, float, str)) and not isinstance(one.default, bool):
        shown = one.default.value if isinstance(one.default, Enum) else one.default
        said += [f"Default: {shown}."] if shown != "" else []
    if one.many and not _is_one(one):
        said.append("May be repeated.")
    if one.info.envvar:
        said.append(f"Or the environment variable `{one.info.envvar}`.")
    return f"| {name} | {takes} | {' '.join(said)} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
