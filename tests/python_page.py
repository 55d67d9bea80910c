"""docs/reference/python.md: what ``import saf`` offers, from the docstrings.

python -m tests.python_page       # writes the page
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import saf
import saf.alembic
import saf.config
import saf.spark
import saf.testing
import saf.ui
import saf.webhooks
from saf.errors import SafError
from tests.docstrings import attribute_docstrings, markdown, one_line

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "python.md"
LONGEST = 90

HEAD = """# Python

This page is for developers who look up a name. It lists every public name of `saf`, functions of
its other modules, and the fixtures of `saf.testing`, with signature and docstring.
[Sending](../sending.md), [Receiving](../receiving.md), [Conversations](../conversations.md) and
[Testing](../testing.md) explain how to use them. `python -m tests.python_page` writes it from the
code.
"""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Sending": ("Outbox", "Message", "event", "upcaster"),
    "Receiving": (
        *(
            "receive",
            "areceive",
            "Delivery",
            "Received",
            "Worker",
            "Processors",
            "Processor",
            "handles",
        ),
        *("Policy", "inbox_once", "create_service", "set_fairness", "traced"),
    ),
    "Routing": ("add_route", "Resolved"),
    "Schema": ("migrate", "Migrated"),
    "Dialogs": (
        *("begin_dialog", "open_dialog", "Dialog", "begin_monolog", "conversations"),
        *("Conversation", "group_state", "set_group_state", "move_dialog", "create_contract"),
        *("create_message_type", "Saga", "Process"),
    ),
}


MODULES: Mapping[str, Any] = {
    "saf.alembic.include_name": saf.alembic.include_name,
    "saf.alembic.include_object": saf.alembic.include_object,
    "saf.config.load": saf.config.load,
    "saf.config.load_signer": saf.config.load_signer,
    "saf.config.load_keys": saf.config.load_keys,
    "saf.webhooks.inbox": saf.webhooks.inbox,
    "saf.webhooks.broker": saf.webhooks.broker,
    "saf.webhooks.verify": saf.webhooks.verify,
    "saf.spark.register": saf.spark.register,
    "saf.spark.to_delta": saf.spark.to_delta,
    "saf.testing.django_database": saf.testing.django_database,
    "saf.ui.app": saf.ui.app,
}
"""Functions that pages use and that `import saf` does not load."""


def groups() -> Iterator[tuple[str, list[str]]]:
    """The names of each part of the page: the errors are those that no other part has."""
    named = {name for names in GROUPS.values() for name in names}
    for title, names in GROUPS.items():
        yield title, list(names)
    left = [name for name in saf.__all__ if name not in named]
    others = [name for name in left if not _is_error(getattr(saf, name))]
    if others:
        yield "More", others
    yield "Errors", sorted(set(left) - set(others), key=_depth)


def page() -> str:
    """The page."""
    written = [HEAD]
    for title, names in groups():
        written.append(f"## {title}\n")
        if title == "Errors":
            written.append(
                "Programs tell errors apart by their class. The text of an error names the value "
                "at fault and the way out. [Commands](cli.md#exit-codes) end with the exit code.\n"
            )
            written += [_error(getattr(saf, name)) for name in names]
        else:
            written += [_described(f"saf.{name}", getattr(saf, name)) for name in names]
    written.append(
        "## Other modules\n\n`import saf` does not load these modules: import them by name.\n"
    )
    written += [_described(name, value) for name, value in MODULES.items()]
    written.append("## Fixtures of saf.testing\n")
    for name in saf.testing.__all__:
        value = getattr(saf.testing, name)
        if name.startswith("saf_"):
            function = value.__wrapped__ if hasattr(value, "__wrapped__") else value
            gives = str(inspect.signature(function).return_annotation)
            gives = re.sub(r"^Iterator\[(.*)\]$", r"\1", gives)
            written.append(f"- `{name}` (`{gives}`): {one_line(function.__doc__ or '')}")
        elif name[0].isupper() and not _is_error(value):
            written.append("\n" + _described(f"saf.testing.{name}", value))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(written)).strip() + "\n"


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _depth(name: str) -> tuple[str, ...]:
    """Sorts an error behind the one that it is derived from."""
    return tuple(one.__name__ for one in reversed(getattr(saf, name).__mro__))


def _error(error: type[SafError]) -> str:
    return (
        f"### saf.{error.__name__}\n\nA `{error.__mro__[1].__name__}`, exit code "
        f"{error.exit_code}. {markdown(error.__doc__ or '')}\n"
    )


def _described(name: str, value: Any) -> str:
    """A function, or a class with what it has."""
    written = [f"### {name}\n", _signature(name, value), markdown(value.__doc__ or ""), ""]
    if not isinstance(value, type):
        return "\n".join(written)
    meaning = attribute_docstrings(value)
    if dataclasses.is_dataclass(value):
        fields = [one.name for one in dataclasses.fields(value) if one.name in meaning]
        written += ["*Fields*\n"] if fields else []
        written += [f"- `{field}`: {one_line(meaning[field])}" for field in fields]
        written += [""] if fields else []
    for member, what in members(value):
        if isinstance(what, property):
            written.append(f"- `{member}`: {one_line(what.__doc__ or '')}")
        else:
            short = name.rpartition(".")[2]
            written += ["", f"#### {short}.{member}", "", _signature(member, what)]
            written += [markdown(what.__doc__ or ""), ""]
    return "\n".join(written)


def members(of: type) -> Iterator[tuple[str, Any]]:
    """The public properties, and then the public methods, that saf has given a class."""
    ours = [one for one in of.__mro__ if one.__module__.partition(".")[0] == "saf"]
    found: dict[str, Any] = {}
    for one in ours:
        for name, value in vars(one).items():
            if not name.startswith("_"):
                found.setdefault(name, value)
    yield from ((n, v) for n, v in found.items() if isinstance(v, property) and v.__doc__)
    for name, value in found.items():
        if isinstance(value, (classmethod, staticmethod)):
            yield name, value.__func__
        elif inspect.isfunction(value):
            yield name, value


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    if isinstance(value, type):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    text = _plain(str(signature.replace(parameters=parameters)))
    line = f"{name}{text}"
    if len(line) > LONGEST:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in _arguments(parameters)) + ")"
        if signature.return_annotation is not inspect.Signature.empty:
            line += _plain(f" -> {signature.return_annotation}")
    return f"```python\n{line}\n```\n"


def _arguments(parameters: list[inspect.Parameter]) -> Iterator[str]:
    star = False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not star:
            yield "*"
            star = True
        star = star or one.kind is one.VAR_POSITIONAL
        yield _plain(str(one))


def _plain(signature: str) -> str:
    """Annotations without quotes; texts that are defaults keep theirs."""
    return re.sub(r"= '([^']*)'", r'= "\1"', signature).replace("'", "")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
