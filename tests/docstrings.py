"""What docstrings say, as Markdown; for the pages of the reference."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

SECTION = re.compile(r"(Args|Raises|Returns|Yields):$")


def attribute_docstrings(of: type) -> dict[str, str]:
    """What stands below each attribute of a class and of those that it is derived from."""
    found: dict[str, str] = {}
    for one in reversed(of.__mro__):
        if one.__module__.partition(".")[0] != "saf":
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(body, ast.ClassDef)
        for attribute, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(attribute, ast.AnnAssign)
                and isinstance(attribute.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[attribute.target.id] = inspect.cleandoc(below.value.value)
    return found


def markdown(docstring: str) -> str:
    """A docstring with its sections as lists, and its examples as code.

    >>> print(markdown("Say it.\\n\\nRaises:\\n    Unavailable: nobody\\n        answers."))
    Say it.
    <BLANKLINE>
    *Raises*
    <BLANKLINE>
    - `Unavailable`: nobody answers.
    """
    return "\n\n".join(_part(part) for part in _parts(inspect.cleandoc(docstring).splitlines()))


def one_line(docstring: str) -> str:
    """The same for a cell of a table."""
    return " ".join(docstring.split()).replace("|", "\\|").replace("``", "`")


def _parts(lines: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for line in lines:
        if line:
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _part(lines: list[str]) -> str:
    if match := SECTION.match(lines[0]):
        text = textwrap.dedent("\n".join(lines[1:]))
        items = re.split(r"\n(?=\S)", text)
        return f"*{match[1]}*\n\n" + "\n".join(map(_item, items))
    if lines[0].startswith(">>>"):
        return "```pycon\n" + "\n".join(lines) + "\n```"
    if all(line.startswith("    ") for line in lines):
        return "```text\n" + textwrap.dedent("\n".join(lines)) + "\n```"
    return "\n".join(lines).replace("``", "`")


def _item(text: str) -> str:
    name, _, meaning = " ".join(text.split()).partition(": ")
    names = ", ".join(f"`{one}`" for one in name.split(", ")) if meaning else name
    return f"- {names}: {meaning}".replace("``", "`") if meaning else f"- {name}"
