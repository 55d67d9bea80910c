"""The list, a module per part of the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.mutants.listed import (
    broker,
    destinations,
    dialogs,
    dispatch,
    forwarding,
    kit,
    log,
    metrics,
    operating,
    ops,
    plans,
    promises,
    receiving,
    routing,
    rows,
    sending,
    setaside,
    signing,
    sinks,
    strangers,
    streams,
    table,
    tracing,
    transforms,
    ui,
    webhooks,
)
from tests.mutants.mutant import Mutant

PARTS: Mapping[str, Sequence[Mutant]] = {
    "broker": broker.MUTANTS,
    "destinations": destinations.MUTANTS,
    "dialogs": dialogs.MUTANTS,
    "dispatch": dispatch.MUTANTS,
    "forwarding": forwarding.MUTANTS,
    "kit": kit.MUTANTS,
    "log": log.MUTANTS,
    "metrics": metrics.MUTANTS,
    "operating": operating.MUTANTS,
    "ops": ops.MUTANTS,
    "plans": plans.MUTANTS,
    "promises": promises.MUTANTS,
    "receiving": receiving.MUTANTS,
    "routing": routing.MUTANTS,
    "rows": rows.MUTANTS,
    "sending": sending.MUTANTS,
    "setaside": setaside.MUTANTS,
    "signing": signing.MUTANTS,
    "sinks": sinks.MUTANTS,
    "strangers": strangers.MUTANTS,
    "streams": streams.MUTANTS,
    "table": table.MUTANTS,
    "ui": ui.MUTANTS,
    "tracing": tracing.MUTANTS,
    "transforms": transforms.MUTANTS,
    "webhooks": webhooks.MUTANTS,
}
