"""A checkpoint of a stream against what its database knows: which go on, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from saf.errors import NotThisStream, StreamSetBack
from saf.log.offset import Offset
from saf.log.stream import State, check

DONE, OPEN, LATER = "100:100:", "120:120:", "140:140:"
COMMITTED = Offset(
    broker="a", incarnation=2, subscription=7, batch=5, done=DONE, open=OPEN, position=50
)
KNOWN = State(
    what="broker 'app'",
    name="lake",
    committed=COMMITTED,
    batch=5,
    end=OPEN,
    epoch=1,
    shards=64,
    now=LATER,
)


@pytest.mark.parametrize(
    "given",
    [
        COMMITTED,
        replace(COMMITTED, position=51),
        COMMITTED.rest,
        replace(COMMITTED, settled=True),
    ],
)
def test_a_checkpoint_that_has_what_was_committed_goes_on(given: Offset) -> None:
    check(given, KNOWN)


@pytest.mark.parametrize(
    "older",
    [
        replace(COMMITTED, position=49),
        replace(COMMITTED, batch=4, done="90:90:", open=DONE, position=60),
        replace(COMMITTED, batch=4, done="90:90:", open="", position=0),
    ],
)
def test_a_checkpoint_that_lacks_what_was_committed_is_refused(older: Offset) -> None:
    """What lies between may be purged, so it would be left out in silence."""
    with pytest.raises(NotThisStream, match="has committed more than the checkpoint holds"):
        check(older, KNOWN)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"batch": 6}, "knows 5 batches, and the checkpoint 6"),
        ({"open": "121:121:"}, "another batch 5"),
        ({"batch": 4, "open": "", "position": 0, "done": LATER}, "another batch 4"),
        ({"incarnation": 1}, "was repaired"),
        ({"incarnation": 3}, "was repaired"),
    ],
)
def test_a_checkpoint_of_a_database_that_had_more_is_refused(
    more: dict[str, Any], says: str
) -> None:
    with pytest.raises(StreamSetBack, match=says):
        check(replace(COMMITTED, **more), KNOWN)


def test_a_batch_of_transactions_that_the_database_has_not_begun_is_refused() -> None:
    """As after a set-back in which as many batches were opened again."""
    with pytest.raises(StreamSetBack, match="another batch 5"):
        check(COMMITTED, replace(KNOWN, now="110:110:"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"broker": "b"}, "was made with broker b"),
        ({"subscription": 8}, "is not the checkpoint's subscription"),
    ],
)
def test_a_checkpoint_of_another_broker_or_subscription_is_refused(
    more: dict[str, Any], says: str
) -> None:
    with pytest.raises(NotThisStream, match=says):
        check(replace(COMMITTED, **more), KNOWN)
