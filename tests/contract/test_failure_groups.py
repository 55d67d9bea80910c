"""Failure groups: messages set aside for one cause are listed, and decided about, together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saf.broker.services import create_service, create_subscription
from saf.config import Broker, Settings
from saf.database import Dsn, fetch
from saf.operating import decide, figures
from saf.operating.decide import Decision, in_chunks
from saf.setaside.failure_groups import FailureGroup, failure_groups
from saf.setaside.fingerprint import fingerprint, fingerprint_of
from saf.setaside.selection import DeadLetters, ParkedMessages
from saf.setaside.waiting import Lanes, due, parked, retry_now
from saf.telemetry import metrics as m
from tests.pipeline import connect

SETTINGS = Settings(brokers={"shop": Broker(dsn=Dsn("dbname=shop"))})
LETTER = """
INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, reason, error, to_service,
                             key, body, dead_letter_at)
SELECT subscription_id, 'mom', 0, 1, %s, %s, %s, %s, '',
       timestamptz '2026-01-31Z' + %s * interval '1 s'
FROM saf.subscription WHERE log = 'outbox' AND name = 'forwarder'
"""
LETTERS = [
    ("rejected", "order 4711 of 'Jones' has no price", "billing", "a"),
    ("rejected", "order 4712 of 'O'Brien' has no price", "billing", "b"),
    ("rejected", "order 4713 has no price", "billing", "c"),
    ("rejected", 'order 4714 of "Smith" has no price', "billing", "d"),
    ("rejected", "order 4715 of 'Jones' has no price", "shipping", "e"),
    ("failed", "order 4716 of 'Jones' has no price", "billing", "f"),
]
"""Three of one cause, and others with another text, service or reason."""

ANY = st.lists(
    st.text(
        st.sampled_from("ab zZ09'\"\\.,:;-_/+@\n\té…") | st.characters(exclude_characters="\0"),
        max_size=40,
    )
    | st.lists(
        st.sampled_from(
            ["DETAIL: ", "b'", "can't", "'x'", ' "', "\\", "A-17", "2026-01-31T12:00:07.5+01:00",
             "10.0.0.7:5432", ", ", "é'", "'é", "_'", "'_", "0x7f", "\n", "…", "²", "٣"]
        )
    ).map("".join),
    min_size=1, max_size=50,
)  # fmt: skip


@pytest.fixture
def readers(app: Dsn) -> Iterator[tuple[psycopg.Connection[Any], ...]]:
    """Sessions that read literals in the two ways that there are."""
    with connect(app) as one, connect(app) as other:
        other.execute("SET standard_conforming_strings = off")
        yield one, other


@pytest.mark.every_postgresql
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(errors=ANY)
def test_the_database_and_python_find_the_same_fingerprints(
    readers: tuple[psycopg.Connection[Any], ...], errors: list[str]
) -> None:
    texts = [error.encode("utf-8", "ignore").decode() for error in errors]
    texts.append("x " * 249 + "'cut inside' here")
    query = f"SELECT {fingerprint_of('error')} FROM unnest(%(texts)s::text[]) AS t (error)"
    for connection in readers:
        found = [value for (value,) in fetch(connection, query, {"texts": texts})]
        assert found == [fingerprint(text) for text in texts]


def bury(connection: psycopg.Connection[Any], *letters: tuple[str, str, str, str]) -> None:
    for number, letter in enumerate(letters):
        connection.execute(LETTER, [*letter, number])


def dead_groups(connection: psycopg.Connection[Any], **chosen: Any) -> list[FailureGroup]:
    return [*failure_groups(connection, DeadLetters(**chosen)).shown]


def keys(connection: psycopg.Connection[Any], **chosen: Any) -> list[str | None]:
    return [row.key for row in DeadLetters(**chosen).rows(connection)]


@pytest.mark.every_postgresql
def test_dead_letters_of_one_cause_are_one_group_with_its_newest_as_the_example(app: Dsn) -> None:
    with connect(app) as connection:
        bury(connection, *LETTERS)
        found = failure_groups(connection, DeadLetters())
        assert (found.groups, found.more, found.beyond) == (4, 0, None)
        largest = found.shown[0]
        assert largest.fingerprint == "order … of … has no price"
        assert (largest.subscription, largest.destination) == ("forwarder", "mom")
        assert (largest.service, largest.reason, largest.messages) == ("billing", "rejected", 3)
        assert (largest.first_at.second, largest.last_at.second) == (0, 3)
        assert (largest.key, largest.error) == ("d", LETTERS[3][1])
        assert [group.messages for group in found.shown[1:]] == [1, 1, 1]
        assert [group.messages for group in dead_groups(connection, service="shipping")] == [1]
        limited = failure_groups(connection, DeadLetters(), 1)
        assert ([group.messages for group in limited.shown], limited.more) == ([3], 3)


@pytest.mark.parametrize("action", ["retry", "discard"])
def test_a_decision_about_a_group_concerns_its_messages_alone(app: Dsn, action: str) -> None:
    with connect(app) as connection:
        bury(connection, *LETTERS)
        largest, *others = dead_groups(connection)
        assert keys(connection, group=largest.group) == ["a", "b", "d"]
        assert DeadLetters(group=largest.group).count(connection, 10).messages == 3
        assert len(Decision(action=action)(connection, DeadLetters(group=largest.group), "")) == 3
        assert keys(connection) == ["c", "e", "f"]
        assert {*dead_groups(connection)} == {*others}
        assert len(decide.discard(connection, DeadLetters(group=others[0].group), "")) == 1


def test_the_same_cause_has_the_same_group_at_another_broker(app: Dsn, mom: Dsn) -> None:
    with connect(app) as one, connect(mom) as other:
        bury(one, *LETTERS)
        bury(other, ("rejected", "order 9 of 'Miller' has no price", "billing", "z"))
        (group,) = dead_groups(other)
        assert group.group == dead_groups(one)[0].group


@dataclass(frozen=True, kw_only=True)
class Noting(Decision):
    """A decision that notes after which number each chunk begins."""

    beyond: list[int | None] = field(default_factory=list)

    def held(self, connection: Any, chosen: Any, *arguments: Any, **options: Any) -> Any:
        self.beyond.append(chosen.beyond)
        return super().held(connection, chosen, *arguments, **options)


def test_a_decision_does_not_read_again_what_it_has_passed(app: Dsn) -> None:
    with connect(app) as connection:
        bury(connection, *LETTERS)
        group = dead_groups(connection)[0]
        first, second, third = [
            row.dead_letter_id for row in DeadLetters(group=group.group).rows(connection)
        ]
        decision = Noting(action="discard")
        chunks = [*in_chunks(connection, decision, DeadLetters(group=group.group), "", chunk=1)]
        assert [len(ids) for ids in chunks] == [1, 1, 1]
        assert decision.beyond == [None, first, second, third]


def test_with_a_bound_only_the_newest_are_grouped_and_the_answer_says_where_they_begin(
    app: Dsn,
) -> None:
    with connect(app) as connection:
        bury(connection, *LETTERS)
        numbers = [row.dead_letter_id for row in DeadLetters().rows(connection)]
        found = failure_groups(connection, DeadLetters(), newest=4)
        assert found.beyond == numbers[1]
        assert {group.key for group in found.shown} == {"c", "d", "e", "f"}
        chosen = DeadLetters(beyond=found.beyond, service="billing", reason="rejected")
        assert keys(connection, beyond=found.beyond, service="billing", reason="rejected") == [
            "c",
            "d",
        ]
        assert len(decide.discard(connection, chosen, "")) == 2
        assert failure_groups(connection, DeadLetters(), newest=6).beyond is None
        further = DeadLetters(beyond=numbers[4])
        assert [group.key for group in failure_groups(connection, further, newest=6).shown] == ["f"]


WAITING = """
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, attempts, error,
                         next_attempt_at)
SELECT subscription_id, '', 'key', %(key)s, 1, 1, %(error)s, now() + interval '1 h'
FROM saf.subscription WHERE name = 'reader';
"""
PARK = """
INSERT INTO saf.parked (subscription_id, kind, subject, shard, id, batch, position, to_service, key,
                        body)
SELECT subscription_id, 'key', %(key)s, 1, n, 1, n, 'billing', %(key)s, ''
FROM saf.subscription, generate_series(1, %(messages)s) AS n WHERE name = 'reader'
"""
AHEAD = """
INSERT INTO saf.parked (subscription_id, kind, subject, shard, id, batch, position, to_service,
                        body)
SELECT subscription_id, 'ahead', 'a dialog', 1, 9, 1, 9, 'billing', ''
FROM saf.subscription WHERE name = 'reader'
"""


@pytest.fixture
def waiting(app: Dsn) -> Iterator[psycopg.Connection[Any]]:
    """Three keys that wait after a failure, two of which have one cause."""
    with connect(app) as connection:
        create_service(connection, "billing")
        create_subscription(connection, "reader", service="billing")
        for key, messages, error in (
            ("A-1", 2, "KeyError: 'price'"),
            ("A-2", 3, "KeyError: 'customer'"),
            ("A-3", 4, "ValueError: no customer"),
        ):
            connection.execute(WAITING, {"key": key, "error": error})
            connection.execute(PARK, {"key": key, "messages": messages})
        connection.execute(AHEAD)
        yield connection


@pytest.mark.every_postgresql
def test_parked_messages_are_grouped_by_the_error_of_their_lane(
    waiting: psycopg.Connection[Any],
) -> None:
    first, second = failure_groups(waiting, ParkedMessages()).shown
    assert (first.messages, first.fingerprint, first.reason) == (5, "KeyError: …", "key")
    assert (first.key, first.error) == ("A-2", "KeyError: 'customer'")
    assert (second.messages, second.fingerprint) == (4, "ValueError: no customer")
    rows = ParkedMessages(group=first.group).rows(waiting)
    assert [row.key for row in rows] == ["A-1"] * 2 + ["A-2"] * 3
    assert len(decide.discard(waiting, ParkedMessages(group=first.group), "")) == 5
    left = ParkedMessages().rows(waiting)
    assert [row.key for row in left] == ["A-3"] * 4 + [None]


def test_lanes_of_a_group_are_listed_and_retried_alone(
    waiting: psycopg.Connection[Any],
) -> None:
    group, _ = failure_groups(waiting, ParkedMessages()).shown
    chosen = Lanes(group=group.group)
    assert {lane.subject for lane in parked(waiting, lanes=chosen).shown} == {"A-1", "A-2"}
    assert due(waiting, chosen).tried == 2
    assert retry_now(waiting, lanes=chosen) == 2
    now = {lane.subject for lane in parked(waiting).shown if lane.due}
    assert now == {"A-1", "A-2"}


def test_messages_that_wait_for_different_services_at_a_destination_are_not_one_group(
    app: Dsn,
) -> None:
    with connect(app) as connection:
        for service in ("biling", "shiping"):
            connection.execute(
                "INSERT INTO saf.backoff (subscription_id, destination, kind, subject, error) "
                "SELECT subscription_id, 'mom', 'service', %(name)s, "
                "'mom knows no service ''' || %(name)s || '''' FROM saf.subscription "
                "WHERE name = 'forwarder'",
                {"name": service},
            )
            connection.execute(
                "INSERT INTO saf.parked (subscription_id, destination, kind, subject, shard, id, "
                "batch, position, to_service, body) SELECT subscription_id, 'mom', 'service', "
                "%(name)s, 1, 1, 1, 1, %(name)s, '' FROM saf.subscription WHERE name = 'forwarder'",
                {"name": service},
            )
        found = failure_groups(connection, ParkedMessages()).shown
        assert {(group.service, group.destination) for group in found} == {
            ("biling", "mom"),
            ("shiping", "mom"),
        }


def test_metrics_name_the_largest_group_of_each_subscription_and_reason_alone(app: Dsn) -> None:
    with connect(app) as connection:
        bury(connection, *LETTERS)
        many = [("rejected", f"{'word ' * n}fails", "billing", "k") for n in range(40)]
        bury(connection, *many)
        largest = dead_groups(connection, reason="rejected")[0]
        samples = figures.asker(SETTINGS)(connection, "shop")
        found = {one.labels: one.value for one in samples if one.metric is m.DEAD_GROUP}
        series = [labels for labels in found if labels[3] == "rejected"]
        assert series == [("shop", "forwarder", "billing", "rejected", largest.group)]
        assert found[series[0]] == 3
        assert {labels[3] for labels in found} == {"rejected", "failed"}
        assert len(found) == 2


def test_of_many_groups_only_those_that_are_shown_leave_the_database(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.dead_letter (subscription_id, shard, id, reason, error, to_service, "
            "body) SELECT 1, 0, n, 'failed', translate(n::text, '0123456789', 'abcdefghij'), "
            "'billing', '' FROM generate_series(1, 20000) AS n"
        )
        found = failure_groups(connection, DeadLetters(), 10)
        assert (len(found.shown), found.groups, found.more) == (10, 20_000, 19_990)


def test_a_retried_message_keeps_its_error_and_its_group(mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
        connection.execute(
            "INSERT INTO saf.dead_letter"
            " (subscription_id, destination, shard, id, reason, error, to_service, key, body)"
            " SELECT subscription_id, '', 0, n, 'failed', 'CheckViolation: row ' || n, 'billing',"
            " 'A-' || n, '' FROM saf.subscription, generate_series(1, 2) AS n"
            " WHERE name = 'billing'"
        )
        decide.retry(connection, DeadLetters(numbers=[1]), "")
        decide.retry(connection, DeadLetters(numbers=[2]), "", "ann")
        errors = [lane.error for lane in parked(connection).shown]
        assert errors == [
            "retried by postgres; before: CheckViolation: row 1",
            "retried by ann; before: CheckViolation: row 2",
        ]
        (group,) = failure_groups(connection, ParkedMessages()).shown
        assert (group.messages, group.fingerprint) == (2, "CheckViolation: row …")
