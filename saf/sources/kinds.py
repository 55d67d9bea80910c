"""Kinds of sources: a source's ``kind`` names the class of its settings.

A package declares a kind of its own as an entry point of the group ``saf.sources``:

    [project.entry-points."saf.sources"]
    paper = "our_package.paper:Paper"

saf's own kinds are listed here; other packages cannot take their names. saf imports a kind only
when a saf.toml uses it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from saf.sources.settings import SourceSettings

GROUP = "saf.sources"
OURS = {"kafka": "saf.sources.kafka:Kafka", "redis": "saf.sources.redis:Redis"}


def known() -> list[str]:
    """Return the names of all kinds."""
    return sorted({*OURS, *(declared.name for declared in entry_points(group=GROUP))})


def settings_of(kind: str) -> type[SourceSettings]:
    """Return the class of settings of a kind.

    Raises:
        ValueError: the kind does not exist, or its package cannot be imported.
    """
    found: object
    if kind in OURS:
        module, _, name = OURS[kind].partition(":")
        found = getattr(import_module(module), name)
    else:
        declared = next(iter(entry_points(group=GROUP, name=kind)), None)
        if declared is None:
            raise ValueError(
                f"unknown kind of source {kind!r}, only {', '.join(known())}; is its package "
                "installed?"
            )
        try:
            found = declared.load()
        except Exception as error:
            reason = " ".join(str(error).split()) or "no more is known"
            raise ValueError(
                f"the package of kind {kind!r} cannot be imported: {type(error).__name__}: {reason}"
            ) from None
    if not (isinstance(found, type) and issubclass(found, SourceSettings)):
        raise ValueError(  # noqa: TRY004 - a setting is at fault, for pydantic
            f"kind {kind!r} is {found!r}, which is not a class of settings: its package is at fault"
        )
    return found


def _of_its_kind(table: object) -> object:
    """Validate a table of saf.toml as the settings of its kind."""
    if not isinstance(table, dict):
        return table
    kind = table.get("kind")
    if not isinstance(kind, str):
        raise ValueError(f"a source needs a kind, one of {', '.join(known())}")  # noqa: TRY004 - pydantic's
    return settings_of(kind).model_validate(table)


AnySource = Annotated[SerializeAsAny[SourceSettings], BeforeValidator(_of_its_kind)]
"""Settings of any kind; ``kind`` selects the class."""
