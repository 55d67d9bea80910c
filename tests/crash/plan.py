"""The plan of a round: who runs and what goes wrong when, a pure function of (seed, round)."""

from __future__ import annotations

import random
from collections.abc import Mapping
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
TRANSFORMS = 0.5
"""The share of those in which forwarders transform messages."""
LOOPING = 0.6
NAMES = 0.7
"""The share of the rounds with whole forwarders in which writers also send by name."""
TRANSFORMS_WITHOUT_SPARK = 0.2
"""The share of the others, in which plain Python does what Spark does there."""
TRANSFORMS_SET_BACK = 0.35
"""The share of those of the others in which something is set back."""
HELD = "kill_held"
"""What goes wrong besides in these."""
STREAMS = 0.3
"""The share of those with streams."""
STREAM_FAULTS = ("kill_stream", "kill_stream_worker")
"""What goes wrong with their driver."""
HUBS_EVERY = 3
"""In each round of so many, talks go by hubs."""

SET_BACKS = {
    "set_back_source": "back_up_source",
    "restore_source": "back_up_source",
    "set_back_mom": "back_up_mom",
}
"""Set-backs, and what has to come before each."""
OF_SOURCE = {kind: SET_BACKS[kind] for kind in ("set_back_source", "restore_source")}
"""Those of the application's database, whatever the destination is."""
CLOCKS = ("clock_back_source", "clock_back_mom")
"""Clocks that go back."""
CLOCK = 0.15
"""The share of rounds with one."""
MOVES = ("move_source", "promote_source")
"""Ways to move the application's database, which is then at its new place."""
MOVE = 0.1
"""The share of the rounds in which it is moved, of those in which nothing is set back."""
MORE = (
    "hold_lock",
    "disk_full_source",
    "freeze_source",
    "freeze_mom",
    "hold_rows",
    "vanish_mom",
    "jump_clock_source",
    "jump_clock_mom",
)
"""What may go wrong besides, in any round that is not on Spark."""
OF_MORE = {
    "kill_consumer": "consumers",
    "stop_consumer": "consumers",
    "kill_router": "hubs",
    "stop_router": "hubs",
    "kill_pooler": "pooled",
}
"""What may go wrong with those who are there in some rounds only."""
VISITED = "kill_ui"
"""What goes wrong besides in rounds with a dashboard."""
VISITS = 0.2
"""The share of rounds with one."""
SET_BACK = 0.25
"""The share of rounds in which something is set back."""


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
    names: bool = False
    """Writers also send by name, later, and take back."""
    looping: bool = False
    """Forwarders are whole forwarders without Spark; else their steps, one after the other."""
    dialogs: bool
    """The application and the MOM store talk, both ways."""
    hubs: int = 0
    """How many routing services some of the talks go by."""
    consumers: bool = False
    """Processors and workers receive what the MOM stores have."""
    hostile: bool = False
    """Somebody with a sender's rights alone does what he can."""
    pooled: bool = False
    """Writers are behind a pooler."""
    visited: bool = False
    """Somebody reads the pages of `saf ui`."""
    mortal: float = 0.0
    """The share of messages that expire within a moment."""
    transactions: int | None = None
    """How many each writer begins at most."""
    transforms: tuple[str, ...] = ()
    """The services whose messages are transformed on their way."""
    streams: bool = False
    """A driver of Spark streams what the application sends, and what the MOM store has."""
    faults: tuple[Fault, ...]


def plan(seed: int, number: int, kinds: tuple[str, ...] = FAULTS) -> Plan:
    """The plan of a round.

    >>> plan(7, 3) == plan(7, 3) != plan(8, 3)
    True
    """
    chance = random.Random(f"{seed} {number}")
    others = set(kinds) - {*FAULTS, *MORE, *OF_MORE, *SET_BACKS, *SET_BACKS.values(), VISITED}
    others -= {*CLOCKS, *MOVES}
    spark = number % SPARK_EVERY == SPARK_EVERY - 1 or others != set()
    turn, ordinary = number, kinds is FAULTS
    if spark and ordinary:
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
    if not ordinary:
        return _kept(made)
    if spark:
        return _on_spark(made)
    if made.dialogs:
        made = replace(made, faults=(*faults, replace(faults[-1], kind=SILENCE)))
    made = _transforms(visited(set_back(_more(made))), TRANSFORMS_WITHOUT_SPARK)
    return _named(_looping(_moved(_clock_back(made))))


def transformed(seed: int, number: int) -> tuple[str, ...]:
    """The services that are transformed in a round in which some are."""
    chance = random.Random(f"{seed} {number} transformed")
    return tuple(sorted(chance.sample(list(QUALITIES), chance.randint(1, len(QUALITIES)))))


def _on_spark(made: Plan) -> Plan:
    """Perhaps with transforms, and with streams."""
    made = _transforms(made, TRANSFORMS)
    chance = random.Random(f"{made.seed} {made.round} streams")
    if chance.random() >= STREAMS:
        return made
    return _with(replace(made, streams=True), chance, chance.choice(STREAM_FAULTS))


def _transforms(made: Plan, share: float) -> Plan:
    """Perhaps with transforms."""
    chance = random.Random(f"{made.seed} {made.round} transforms")
    if {*SET_BACKS} & {fault.kind for fault in made.faults}:
        share = TRANSFORMS_SET_BACK
    if chance.random() >= share:
        return made
    made = replace(made, transforms=transformed(made.seed, made.round))
    return _with(made, chance, HELD)


def _more(made: Plan) -> Plan:
    """Who else is there, and what else goes wrong; by chance of its own, as all that follows."""
    chance = random.Random(f"{made.seed} {made.round} more")
    hubs = chance.randint(1, 3) if made.round % HUBS_EVERY == HUBS_EVERY - 1 else 0
    made = replace(
        made,
        hubs=hubs,
        dialogs=made.dialogs or hubs > 0,
        consumers=chance.random() < 0.4,
        hostile=chance.random() < 0.25,
        pooled=chance.random() < 0.25,
        mortal=chance.choice((0.0, 0.01)),
    )
    kinds = [*MORE, *(kind for kind, there in OF_MORE.items() if getattr(made, there))]
    return _with(made, chance, *(kind for kind in [chance.choice(kinds)] if chance.random() < 0.6))


def set_back(made: Plan, kinds: Mapping[str, str] = SET_BACKS) -> Plan:
    """A plan in which perhaps something is set back, to a copy that was taken earlier."""
    chance = random.Random(f"{made.seed} {made.round} set back")
    if chance.random() >= SET_BACK:
        return made
    kind = chance.choice(list(kinds))
    return _kept(_with(_with(made, chance, kinds[kind]), chance, kind, last=True))


def _clock_back(made: Plan) -> Plan:
    """Perhaps with a clock that goes back."""
    chance = random.Random(f"{made.seed} {made.round} clock")
    return _with(made, chance, chance.choice(CLOCKS)) if chance.random() < CLOCK else made


def _moved(made: Plan) -> Plan:
    """Perhaps with a move at the end."""
    chance = random.Random(f"{made.seed} {made.round} moved")
    if chance.random() >= MOVE or {*SET_BACKS} & {fault.kind for fault in made.faults}:
        return made
    return _with(made, chance, chance.choice(MOVES), last=True)


def _looping(made: Plan) -> Plan:
    """Perhaps with whole forwarders; transforms need Spark there."""
    chance = random.Random(f"{made.seed} {made.round} looping")
    return replace(made, looping=not made.transforms and chance.random() < LOOPING)


def _named(made: Plan) -> Plan:
    """Perhaps with names, which whole forwarders move; a copy of the database would have both."""
    chance = random.Random(f"{made.seed} {made.round} names")
    back = {*SET_BACKS, *MOVES} & {fault.kind for fault in made.faults}
    return replace(made, names=made.looping and not back and chance.random() < NAMES)


def _kept(made: Plan) -> Plan:
    """A plan without a purge if a destination is set back: what is gone cannot be sent again."""
    backs = {fault.kind for fault in made.faults if fault.kind.startswith("set_back")}
    return replace(made, purge=made.purge and not backs - {*OF_SOURCE})


def visited(made: Plan) -> Plan:
    """A plan in which perhaps somebody visits the dashboard, which is killed."""
    chance = random.Random(f"{made.seed} {made.round} ui")
    if chance.random() >= VISITS:
        return made
    return _with(replace(made, visited=True), chance, VISITED)


def _with(made: Plan, chance: random.Random, *kinds: str, last: bool = False) -> Plan:
    """With more faults, each somewhere among the others, or at the end."""
    faults = list(made.faults)
    for kind in kinds:
        fault = Fault(
            kind=kind,
            after=chance.uniform(0.1, 0.4),
            lasts=chance.uniform(0.2, 0.6),
            target=chance.randrange(100),
        )
        faults.insert(len(faults) if last else chance.randrange(len(faults)), fault)
    return replace(made, faults=tuple(faults))
