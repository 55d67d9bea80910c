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
    Run(model="log", switches=("WRITERS=3",), gate=True),
    Run(model="log", switches=("WRITERS=4",)),
    Run(model="following", gate=True),
    Run(model="following", switches=("WRITERS=4",)),
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
            ("ICEBERG", "MOVES=1", "FAULTS=0"),
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
    Run(model="held", gate=True),
    Run(model="kafka", switches=("TURNS=3",), gate=True),
    Run(model="kafka"),
    Run(model="setback", gate=True),
    Run(model="parked", gate=True),
    Run(model="parked", switches=("WAITS=3", "DECISIONS=2")),
    Run(model="receiving", gate=True),
    Run(model="receiving", switches=("POISON=0",), gate=True),
    Run(model="receiving", switches=("MEMBERS",)),
    Run(model="dialog"),
)
"""Models that find nothing in any state."""

PLANTED = tuple(
    Run(
        model=model,
        switches=tuple(switches.split()),
        finds=finds,
        gate="NO_COMPARE" not in switches or "REDIS" in switches,  # one is as good as the other
    )
    for model, switches, finds in (
        ("log", "WRITERS=3 POLL_BY_ID", "nothing lost"),
        ("log", "NO_IN_PROGRESS", "nothing lost"),
        ("log", "ALL_COMMITTED", "a batch never changes"),
        ("log", "WRITERS=2 NO_LOCK", "order"),
        ("following", "LEVEL_TO_NOW", "nothing lost"),
        ("following", "END_IS_NOW", "nothing lost"),
        ("forwarding", "MESSAGES=2 NO_EPOCH", "fenced"),
        ("forwarding", "MESSAGES=2 NO_MARK", "nothing twice"),
        ("forwarding", "MESSAGES=2 MARK_APART", "no false alarm"),
        ("forwarding", "MESSAGES=2 MARK_FIRST", "no false alarm"),
        ("forwarding", "MESSAGES=2 NO_FENCE", "invalid end state"),
        ("forwarding", "MESSAGES=2 OVERTAKE", "nothing lost"),
        ("forwarding", "KIND=REDIS MESSAGES=2 NO_COMPARE", "nothing twice"),
        ("forwarding", "KIND=NATS MESSAGES=2 NO_COMPARE", "nothing twice"),
        ("forwarding", "KIND=DELTA MESSAGES=2 NO_COMPARE", "nothing twice"),
        ("forwarding", "KIND=ICEBERG MESSAGES=2 NO_COMPARE", "nothing twice"),
        ("forwarding", "KIND=KAFKA MESSAGES=2 NEW_NAME", "nothing twice"),
        ("forwarding", "KIND=KAFKA MESSAGES=2 READ_FIRST", "nothing twice"),
        ("forwarding", "KIND=RABBITMQ_STREAM MESSAGES=2 FENCED", "fenced"),
        ("lanes", "FAULTS=0 NO_EPOCH_ON_REFUSAL", "nothing twice"),
        ("lanes", "FAULTS=0 OVERTAKE", "order"),
        ("lanes", "FAULTS=0 RELEASE_EARLY", "nothing twice"),
        ("lanes", "FAULTS=0 NO_WRITE_AHEAD", "nothing lost"),
        ("held", "CANCEL_WHAT_WAS_READ", "never both"),
        ("held", "MOVE_LOCKED", "nothing twice"),
        ("kafka", "NO_CLAIM", "fenced"),
        ("kafka", "NO_FENCING", "fenced"),
        ("kafka", "FENCE_BEFORE_CLAIM", "fenced"),
        ("kafka", "READ_BEFORE_FENCING", "fenced"),
        ("setback", "BY_NUMBER", "not dropped silently"),
        ("setback", "NOTHING_ACKNOWLEDGED", "not continued silently"),
        ("setback", "NOT_SENT_AGAIN", "not continued silently"),
        ("setback", "NO_SHIFT", "not dropped silently"),
        ("setback", "ONLY_MARKS", "not dropped silently"),
        ("parked", "PERSON_NOTES_NOTHING", "not dropped silently"),
        ("parked", "LANE_NOTES_NOTHING", "not dropped silently"),
        ("parked", "LANE_SAYS_NOTHING", "not dropped silently"),
        ("parked", "NO_SHIFT", "not dropped silently"),
        ("receiving", "NO_LOCK", "nothing twice"),
        ("receiving", "NO_TRACE", "nothing lost"),
        ("receiving", "TAKE_BLIND", "nothing twice"),
        ("receiving", "MEMBERS TAKE_ANY_OWNER", "only the owner handles"),
        ("receiving", "COUNT_LATER", "nothing lost"),
        ("dialog", "NO_COMPARING", "nobody waits for ever"),
        ("dialog", "NO_LINEAGE", "a repeat is one"),
        ("dialog", "TAKE_WHAT_COMES", "in turn"),
        ("dialog", "TAKE_FORGOTTEN", "a repeat is one"),
    )
)
"""Models that leave out one thing that the code does, and what goes wrong then."""
