"""The plan of a round: who runs and what goes wrong when, a pure function of (seed, round)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

QUALITIES = {
    "orders": "exactly_once",
    "audit": "exactly_once",
    "metrics": "at_most_once",
    "events": "at_least_once",
}
"""What each service is promised; its route says so."""

FAULTS = (
    "kill_forwarder",
    "kill_writer",
    "crash_source",
    "crash_mom",
    "stop_forwarder",
    "lose_answer",
    "terminate_source",
    "terminate_mom",
    "disk_full",
    "service_unknown",
    "route_gone",
)

SPARK_FAULTS = (
    "kill_driver",
    "kill_worker",
    "kill_forwarder",
    "crash_mom",
    "kill_worker",
    "crash_source",
    "lose_answer",
    "stop_forwarder",
    "terminate_source",
    "terminate_mom",
    "disk_full",
)
"""For the rounds whose forwarders are ``saf forward --loop``, JVM and Python workers and all."""
DIALOGS = 0.3
"""The share of rounds with dialogs."""
SILENCE = "kill_listener"
"""What goes wrong besides in rounds with dialogs."""
SPARK_EVERY = 25
"""Each round of so many is one of those."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    after: float
    """Seconds since the end of the fault before."""
    lasts: float
    """Seconds, where it lasts."""
    target: int
    """Which process, modulo how many there are."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One round."""

    seed: int
    round: int
    writers: int
    forwarders: int
    destinations: int
    chunk_rows: int
    poison: float
    """The share of messages that the MOM store rejects."""
    purge: bool
    skewed: bool
    """The first forwarder's wall clock is an hour ahead."""
    spark: bool
    """Forwarders are whole Spark jobs; else the same steps, in one process each."""
    dialogs: bool
    """The application and the MOM store talk, both ways."""
    faults: tuple[Fault, ...]


def plan(seed: int, number: int, kinds: tuple[str, ...] = FAULTS) -> Plan:
    """The plan of a round.

    >>> plan(7, 3) == plan(7, 3) != plan(8, 3)
    True
    """
    chance = random.Random(f"{seed} {number}")
    spark = number % SPARK_EVERY == SPARK_EVERY - 1 or set(kinds) - set(FAULTS) != set()
    turn = number
    if spark and kinds is FAULTS:
        kinds, turn = SPARK_FAULTS, number // SPARK_EVERY
    slower = 5 if spark else 1
    faults = tuple(
        Fault(
            # each kind comes by in turn; the others by chance
            kind=kinds[turn % len(kinds)] if nth == 0 else chance.choice(kinds),
            after=chance.uniform(0.1, 0.4) * slower,
            lasts=chance.uniform(0.2, 0.6),
            target=chance.randrange(100),
        )
        for nth in range(chance.randint(2, 4))
    )
    made = Plan(
        seed=seed,
        round=number,
        writers=chance.randint(2, 4),
        forwarders=chance.randint(1, 2 if spark else 4),
        destinations=chance.randint(1, 2),
        chunk_rows=chance.choice((100, 1000) if spark else (3, 20, 1000)),
        poison=chance.choice((0.001, 0.005, 0.02)) if not spark else 0.001,
        purge=chance.random() < 0.4,
        skewed=chance.random() < 0.3 and not spark,
        spark=spark,
        faults=faults,
        # by chance of its own: what else happens in a round stays as it was
        dialogs=not spark and random.Random(f"{seed} {number} dialogs").random() < DIALOGS,
    )
    if not made.dialogs or kinds is not FAULTS:
        return made
    silence = replace(faults[-1], kind=SILENCE)
    return replace(made, faults=(*faults, silence))
