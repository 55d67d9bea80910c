"""Options: groups of command line options, each of which makes one argument of a command.

Commands that choose the same things share their options. A command names a group in the annotation
of the argument that the group makes:

    DEAD = Options({"reason": Reason, "service": Service}, make=Filter)

    @app.command()
    @grouped
    def retry(*, criteria: Annotated[Filter, DEAD], why: Why = "") -> None: ...

    saf dead retry --reason expired --why "…"
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Options:
    """Options by name, as Typer's annotations; those that may be None default to it.

    ``make`` takes them all.
    """

    types: Mapping[str, Any]
    make: Callable[..., Any]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer, which has the options of each group in place of its argument.

    >>> from typing import Annotated
    >>> types = {"folder": Annotated[str, "…"], "file": Annotated[str | None, "…"]}
    >>> PATH = Options(types, make="{folder}/{file}".format)
    >>> shown = []
    >>> def show(*, path: Annotated[str, PATH], twice: bool = False) -> None: shown.append(path)
    >>> options = inspect.signature(grouped(show)).parameters
    >>> {name: option.default is option.empty for name, option in options.items()}
    {'folder': True, 'file': False, 'twice': False}
    >>> grouped(show)(folder="etc", file="saf.toml")
    >>> shown
    ['etc/saf.toml']
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Options] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        options = next((extra for extra in get_args(hint)[1:] if isinstance(extra, Options)), None)
        if options is None:
            parameters.append(parameter.replace(annotation=hint))
            continue
        groups[parameter.name] = options
        parameters += [
            inspect.Parameter(name, parameter.kind, default=_default(type_), annotation=type_)
            for name, type_ in options.types.items()
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for argument, options in groups.items():
            given[argument] = options.make(**{name: given.pop(name) for name in options.types})
        command(**given)

    del run.__wrapped__  # Typer would take the annotations from there
    run.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # it may be set
    return run


def _default(type_: Any) -> Any:
    """Return None if the type of an option permits it; otherwise, the option is required."""
    return None if NoneType in get_args(get_args(type_)[0]) else inspect.Parameter.empty
