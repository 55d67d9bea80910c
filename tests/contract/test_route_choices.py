"""Choices of keys: each is a key's of one service and broker, and is forgotten at its time."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from saf.database import fetch
from saf.routing.route_choices import NOTED_SECONDS, Asker, choose, chosen, forget

Connection = psycopg.Connection[Any]
BROKER = "00000000-0000-0000-0000-000000000007"
ASKERS = [
    Asker("billing", None, "k"),
    Asker("billing", None, "l"),
    Asker("billing", BROKER, "k"),
    Asker("shipping", None, "k"),
]
DAY = 86400.0


@pytest.fixture
def kept(source: Connection) -> Connection:
    """Each asker has chosen a destination of its own."""
    for number, asker in enumerate(ASKERS):
        with source.transaction():
            choose(source, {asker: [f"d{number}"]})
    return source


def used(source: Connection, seconds: float, key: str = "k") -> None:
    """Let choices of a key have been used last before so long."""
    source.execute(
        "UPDATE saf.route_choice SET used_at = now() - make_interval(secs => %s) WHERE key = %s",
        [seconds, key],
    )


def test_a_choice_is_a_keys_of_one_service_and_one_broker(kept: Connection) -> None:
    for number, asker in enumerate(ASKERS):
        assert chosen(kept, [asker]) == {asker: f"d{number}"}
    assert chosen(kept, [Asker("shipping", BROKER, "k"), Asker("shipping", None, "l")]) == {}
    with kept.transaction():
        assert choose(kept, {ASKERS[0]: ["new"]}) == {ASKERS[0]: "new"}
    assert chosen(kept, ASKERS) == {
        asker: "new" if number == 0 else f"d{number}" for number, asker in enumerate(ASKERS)
    }


def test_that_one_choice_is_used_says_nothing_of_others(kept: Connection) -> None:
    used(kept, 10 * DAY)
    with kept.transaction():
        choose(kept, {ASKERS[2]: ["d2"]})
    still = fetch(
        kept, "SELECT destination FROM saf.route_choice WHERE used_at > now() - interval '1 day'"
    )
    assert sorted(still) == [("d1",), ("d2",)]


def test_keys_of_each_service_and_broker_take_turns_by_themselves(source: Connection) -> None:
    def taken(service: str, broker: str | None, *keys: str) -> list[str]:
        with source.transaction():
            askers = {Asker(service, broker, key): ["a", "b"] for key in keys}
            return list(choose(source, askers).values())

    assert sorted(taken("billing", None, "1", "2", "3", "4")) == ["a", "a", "b", "b"]
    (first,) = taken("shipping", None, "1")
    (of_broker,) = taken("billing", BROKER, "1")
    assert first == of_broker == "a"
    assert sorted([*taken("billing", None, "5"), *taken("billing", None, "6")]) == ["a", "b"]


@pytest.mark.parametrize(("days", "left"), [(5.9, 2), (6.1, 1)])
def test_a_choice_is_forgotten_after_the_retention_and_the_time_in_which_uses_go_unnoted(
    source: Connection, days: float, left: int
) -> None:
    assert NOTED_SECONDS == DAY
    for key in ("k", "l"):
        with source.transaction():
            choose(source, {Asker("billing", None, key): ["d"]})
    used(source, days * DAY)
    forget(source, 5 * DAY)
    assert fetch(source, "SELECT count(*) FROM saf.route_choice") == [(left,)]


def test_a_choice_is_kept_for_lanes_of_its_own_destination_and_service(
    source: Connection,
) -> None:
    lane = (
        "INSERT INTO saf.backoff (subscription_id, destination, kind, subject, error) "
        "SELECT subscription_id, %s, %s, %s, '' FROM saf.subscription WHERE name = 'forwarder'"
    )

    def left(destination: str, kind: str, subject: str) -> int:
        with source.transaction(force_rollback=True):
            choose(source, {Asker("billing", None, "k"): ["mom"]})
            used(source, 30 * DAY)
            source.execute(lane, [destination, kind, subject])
            forget(source, 5 * DAY)
            ((count,),) = fetch(source, "SELECT count(*) FROM saf.route_choice")
        return int(count)

    assert left("mom", "main", "") == 1
    assert left("mom", "service", "billing") == 1
    assert left("mom", "service", "shipping") == 0
    assert left("other", "main", "") == 0
    assert left("other", "service", "billing") == 0


def test_a_choice_is_kept_while_a_batch_is_in_hand_that_was_opened_before(
    source: Connection,
) -> None:
    with source.transaction():
        choose(source, {Asker("billing", None, "k"): ["mom"]})
    used(source, 30 * DAY)
    opened = "UPDATE saf.cursor SET open = %s, opened_at = now() - make_interval(secs => %s)"
    source.execute(opened, ["1:1:", 29.5 * DAY])
    assert forget(source, 5 * DAY) == 0
    source.execute(opened, ["1:1:", 28.5 * DAY])
    assert forget(source, 5 * DAY) == 1
