"""The check of both sides: was a source, or one of its destinations, set back?"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from saf.config import Settings
from saf.database import of_broker
from saf.destinations.marks import shards_of
from saf.errors import SafError, in_words
from saf.operating.doctor.patient import Check, Found, Patient
from saf.repair.set_back import IDENTITY, SetBack, remembered
from saf.repair.set_back import set_back as who_was

ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
REPAIR = "saf rebase"


def set_back_by(config: Settings) -> Check:
    """Return the check of a source and the destinations of a saf.toml."""

    def set_back(patient: Patient) -> Found:
        """Check that the forwarder will not reject the source or a destination as set back."""
        for name, found in _met(patient, config):
            if found.ahead:
                yield (
                    "error",
                    f"destination {name!r} has stored more of "
                    f"{in_words(shards_of(found.ahead))} than is known here: it seems to be "
                    "restored from a backup, and is not forwarded",
                    REPAIR,
                )
            if found.behind:
                since = found.since and f"since a batch of {found.since.isoformat()}"
                example = f", such as: {found.lower}" if found.lower else ""
                yield (
                    "error",
                    f"destination {name!r} has lost messages that it acknowledged of "
                    f"{in_words(shards_of(found.behind))}, {since or 'or never had any'}{example}; "
                    "it seems to be restored from a backup, and gets no messages",
                    REPAIR,
                )

    return set_back


def _met(patient: Patient, config: Settings) -> Iterator[tuple[str, SetBack]]:
    """Yield how the forwarder would find each destination that answers: set back or not."""
    source = patient.connection
    (broker_id,) = of_broker(source, IDENTITY)
    for name, destination in config.destinations.items():
        if not destination.capabilities.exactly_once:
            continue
        try:
            before = remembered(source, destination.identity(name))
            known = destination.known(name, broker_id, role="doctor")
        except (psycopg.OperationalError, SafError):
            continue  # its own examination reports this
        with source.transaction():
            source.execute(ONE_SNAPSHOT)
            yield name, who_was(source, name, known, before)
