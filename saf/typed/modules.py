"""Modules of an application: its workers, and its events, for plans and for documents."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import ModuleType
from typing import Any

from saf.errors import SafError, UsageError, masked
from saf.typed.event import Event, event_of

SAF = f"{Path(__file__).parents[1]}{os.sep}"
PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
"""Folders of installed packages."""
OF_OS = (os.__file__, "<frozen os>")
"""Names of the file that raises KeyError for an environment variable that is not set."""


def imported(name: str) -> ModuleType:
    """Import a module of the application, also from the current directory.

    Raises:
        UsageError: the module does not exist, or raises an error.
        SafError: the module raises this error.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except SafError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0]):
            raise UsageError(f"no module {error.name!r} here") from None
        frames = extract_tb(error.__traceback__)
        own = _own(frames)
        if isinstance(error, (TypeError, ValueError)) and not own:
            raise UsageError(f"{name!r} is not the name of a module, such as shop.events") from None
        raise UsageError(f"{_place(name, error, own)}: {_in_words(name, error, frames)}") from error


def _own(frames: Sequence[FrameSummary]) -> Sequence[FrameSummary]:
    """Return the frames of the application: it is in files, or is an installed package."""
    others = [frame for frame in frames if not frame.filename.startswith(("<", SAF))]
    packages = [frame for frame in others if frame.filename.startswith(INSTALLED)]
    files = [frame for frame in others if not frame.filename.startswith((PYTHON, *INSTALLED))]
    return files or packages[:1]


def _place(name: str, error: Exception, own: Sequence[FrameSummary]) -> str:
    """Return the application's last line on the way to an error at import."""
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    elif own:
        file, line = own[-1].filename, own[-1].lineno
    else:
        return f"module {name}"
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {line}"


def _in_words(name: str, error: Exception, frames: Sequence[FrameSummary]) -> str:
    """Return an error's type and text, and what may help."""
    text = error.msg if isinstance(error, SyntaxError) else masked(str(error))
    said = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    if isinstance(error, KeyError) and frames[-1].filename in OF_OS:
        return f"{said}. Is the environment variable set?"
    return f"{said}. `python -c 'import {name}'` shows the traceback"


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
