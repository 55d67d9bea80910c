"""Modules of an application: the events in them, for plans and for documents."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from saf.errors import UsageError
from saf.typed.event import Event, event_of


def imported(name: str) -> ModuleType:
    """Import a module of the application, also from the current directory.

    Raises:
        UsageError: the module does not exist.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise UsageError(f"no module {error.name!r} here") from None
    except (TypeError, ValueError):
        raise UsageError(f"{name!r} is not the name of a module, such as shop.events") from None


def events(module: ModuleType) -> list[Event[Any]]:
    """Return the events that a module has by name, sorted by type.

    Raises:
        UsageError: the module has no event, or two events of one type and version.
    """
    found: dict[tuple[str, int], Event[Any]] = {}
    for value in vars(module).values():
        event: Event[Any] | None = event_of(value) if isinstance(value, type) else None
        if event is None:
            continue
        other = found.setdefault((event.name, event.version), event)
        if other is not event:
            raise UsageError(
                f"{module.__name__}: {other.model.__qualname__} and {event.model.__qualname__} are "
                f"both event {event.name!r} version {event.version}"
            )
    if not found:
        raise UsageError(
            f"module {module.__name__} has no event: decorate a class with @saf.event(…)"
        )
    return [found[key] for key in sorted(found)]
