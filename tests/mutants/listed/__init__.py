"""The list, a module per part of the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.mutants.listed import (
    broker,
    destinations,
    dialogs,
    dispatch,
    forwarding,
    log,
    operating,
    plans,
    promises,
    receiving,
    routing,
    sending,
    setaside,
    sinks,
    streams,
    table,
    tracing,
    transforms,
    ui,
)
from tests.mutants.mutant import Mutant

PARTS: Mapping[str, Sequence[Mutant]] = {
    "broker": broker.MUTANTS,
    "destinations": destinations.MUTANTS,
    "dialogs": dialogs.MUTANTS,
    "dispatch": dispatch.MUTANTS,
    "forwarding": forwarding.MUTANTS,
    "log": log.MUTANTS,
    "operating": operating.MUTANTS,
    "plans": plans.MUTANTS,
    "promises": promises.MUTANTS,
    "receiving": receiving.MUTANTS,
    "routing": routing.MUTANTS,
    "sending": sending.MUTANTS,
    "setaside": setaside.MUTANTS,
    "sinks": sinks.MUTANTS,
    "streams": streams.MUTANTS,
    "table": table.MUTANTS,
    "ui": ui.MUTANTS,
    "tracing": tracing.MUTANTS,
    "transforms": transforms.MUTANTS,
}
