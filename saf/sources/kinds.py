"""Kinds of sources: a source's ``kind`` names the class of its settings.

A package declares a kind of its own as an entry point of the group ``saf.sources``:

    [project.entry-points."saf.sources"]
    paper = "our_package.paper:Paper"

saf's own kinds are listed here; other packages cannot take their names. saf imports a kind only
when a saf.toml uses it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from saf.destinations.kinds import Kinds
from saf.sources.settings import SourceSettings

GROUP = "saf.sources"
OURS = {
    "kafka": "saf.sources.kafka:Kafka",
    "nats": "saf.sources.nats:Nats",
    "rabbitmq": "saf.sources.rabbitmq:Rabbitmq",
    "rabbitmq_stream": "saf.sources.rabbitmq_stream:RabbitmqStream",
    "redis": "saf.sources.redis:Redis",
}


KINDS = Kinds(GROUP, OURS, SourceSettings, "kind of source")
known, settings_of = KINDS.known, KINDS.settings_of


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
