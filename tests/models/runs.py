"""Runs: which models are checked, how large, and which planted errors have to be found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Run:
    """One search."""

    model: str
    """The file in docs/model, without its suffix."""
    switches: tuple[str, ...] = ()
    """What it is told by -D."""
    finds: str = ""
    """Of a planted error: what is violated, in the words beside the model's assertion."""
    gate: bool = False
    """Whether the gate makes it too, because it takes no more than a few seconds."""

    @property
    def name(self) -> str:
        """The model and its switches."""
        return " ".join([self.model, *self.switches])


def _forwarding(kind: str, *switches: str) -> tuple[str, ...]:
    return (f"KIND={kind}", "MESSAGES=2", *switches)


PROVEN = (
    Run(model="log", gate=True),
    Run(model="log", switches=("WRITERS=4",)),
    Run(model="forwarding", switches=_forwarding("POSTGRESQL")),
    *(
        Run(
            model="forwarding",
            switches=_forwarding(kind, "TAKEOVERS=2", *more),
            gate=kind in {"POSTGRESQL", "DELTA"},
        )
        for kind, *more in (
            ("POSTGRESQL",),
            ("REDIS",),
            ("NATS",),
            ("KAFKA", "MOVES=1"),
            ("RABBITMQ_STREAM",),
            ("DELTA",),
        )
    ),
    *(
        Run(
            model="forwarding",
            switches=_forwarding("POSTGRESQL", "TAKEOVERS=2", f"QUALITY={quality}"),
            gate=True,
        )
        for quality in ("AT_LEAST_ONCE", "AT_MOST_ONCE")
    ),
    Run(model="lanes", switches=("FAULTS=0",), gate=True),
    Run(model="lanes", switches=("TAKEOVERS=2",)),
    Run(model="kafka", switches=("TURNS=3",), gate=True),
    Run(model="kafka"),
    Run(model="setback", gate=True),
    Run(model="receiving", gate=True),
    Run(model="receiving", switches=("POISON=0",), gate=True),
    Run(model="receiving", switches=("MEMBERS",)),
    Run(model="dialog"),
)
"""Models that find nothing in any state."""

PLANTED = tuple(
    Run(model=model, switches=tuple(switches.split()), finds=finds, gate=True)
    for model, switches, finds in (
        ("log", "WRITERS=3 POLL_BY_ID", "?"),
        ("log", "NO_IN_PROGRESS", "?"),
        ("log", "ALL_COMMITTED", "?"),
        ("log", "WRITERS=2 NO_LOCK", "?"),
        ("forwarding", "MESSAGES=2 NO_EPOCH", "?"),
        ("forwarding", "MESSAGES=2 NO_MARK", "?"),
        ("forwarding", "MESSAGES=2 MARK_APART", "?"),
        ("forwarding", "MESSAGES=2 MARK_FIRST", "?"),
        ("forwarding", "MESSAGES=2 NO_FENCE", "?"),
        ("forwarding", "MESSAGES=2 OVERTAKE", "?"),
        ("forwarding", "KIND=REDIS MESSAGES=2 NO_COMPARE", "?"),
        ("forwarding", "KIND=NATS MESSAGES=2 NO_COMPARE", "?"),
        ("forwarding", "KIND=DELTA MESSAGES=2 NO_COMPARE", "?"),
        ("forwarding", "KIND=KAFKA MESSAGES=2 NEW_NAME", "?"),
        ("forwarding", "KIND=KAFKA MESSAGES=2 READ_FIRST", "?"),
        ("forwarding", "KIND=RABBITMQ_STREAM MESSAGES=2 FENCED", "?"),
        ("lanes", "FAULTS=0 NO_EPOCH_ON_REFUSAL", "?"),
        ("lanes", "FAULTS=0 OVERTAKE", "?"),
        ("lanes", "FAULTS=0 RELEASE_EARLY", "?"),
        ("lanes", "FAULTS=0 NO_WRITE_AHEAD", "?"),
        ("kafka", "NO_CLAIM", "?"),
        ("kafka", "NO_FENCING", "?"),
        ("kafka", "FENCE_BEFORE_CLAIM", "?"),
        ("kafka", "READ_BEFORE_FENCING", "?"),
        ("setback", "BY_NUMBER", "?"),
        ("setback", "NOTHING_ACKNOWLEDGED", "?"),
        ("setback", "NOT_SENT_AGAIN", "?"),
        ("setback", "NO_SHIFT", "?"),
        ("receiving", "NO_LOCK", "?"),
        ("receiving", "NO_TRACE", "?"),
        ("receiving", "TAKE_BLIND", "?"),
        ("receiving", "MEMBERS TAKE_ANY_OWNER", "?"),
        ("receiving", "COUNT_LATER", "?"),
        ("dialog", "NO_COMPARING", "?"),
        ("dialog", "NO_LINEAGE", "?"),
        ("dialog", "TAKE_WHAT_COMES", "?"),
        ("dialog", "TAKE_FORGOTTEN", "?"),
    )
)
"""Models that leave out one thing that the code does, and what goes wrong then."""
