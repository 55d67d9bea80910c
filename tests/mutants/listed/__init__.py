"""The list, a module per part of the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.mutants.listed import broker, destinations, log
from tests.mutants.mutant import Mutant

PARTS: Mapping[str, Sequence[Mutant]] = {
    "broker": broker.MUTANTS,
    "destinations": destinations.MUTANTS,
    "log": log.MUTANTS,
}
