"""A store that was set back gets its copies of a topic's messages again, and nobody else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from saf import Outbox
from saf.cli.repair import in_words
from saf.database import Dsn, fetch
from saf.destinations.marks import Known
from saf.destinations.postgresql import Postgresql
from saf.operating import decide
from saf.operating.repair.reconcile import reconcile
from saf.operating.repair.send_again import Sent, send_again
from saf.routing.routers import add_router
from saf.routing.routes import add_route, add_topic, current_routes, remove_route, remove_topic
from saf.setaside.selection import DeadLetters
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, run, stores
from tests.programs import configuration, saf

Backup = Callable[[Dsn], Dsn]


def subscribe(app: Dsn, *destinations: str) -> None:
    with connect(app) as connection:
        add_topic(connection, "news")
        for one in destinations:
            add_route(connection, one, service="news")


def tell(
    app: Dsn, *texts: object, service: str = "news", key: str | None = "k", **options: Any
) -> None:
    with connect(app) as connection, connection.transaction():
        for text in texts:
            Outbox().send(connection, service, str(text), key=key, **options)


def again(app: Dsn, **destinations: Dsn) -> dict[str, int]:
    """Repair; how many messages are sent again, by destination."""
    sent = send_again("app", app, stores(**destinations), current_routes, retention_seconds=3600)
    assert sent is not None
    return counts(sent)


def counts(sent: Sent) -> dict[str, int]:
    return {name: len(ids) for name, ids in sent.by_destination.items()}


def test_a_store_set_back_gets_its_copies_again_and_the_others_nothing(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    subscribe(app, "mom", "other")
    tell(app, *range(3))
    run(app, mom=mom, other=other)
    older = backup(mom)
    tell(app, *range(3, 6))
    run(app, mom=mom, other=other)
    assert again(app, mom=older, other=other) == {"mom": 3}
    tell(app, 6)
    run(app, mom=older, other=other)
    for store in (older, other):
        assert bodies(store) == [str(number) for number in range(7)]
    assert reconcile("app", app, stores(mom=older, other=other), retention_seconds=3600).same


def test_reconcile_names_a_lost_copy_and_who_has_lost_it(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup, tmp_path: Path
) -> None:
    subscribe(app, "mom", "other")
    tell(app, 0)
    run(app, mom=mom, other=other)
    older = backup(mom)
    tell(app, 1)
    run(app, mom=mom, other=other)
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": older, "other": other})
    said = saf("reconcile", "--json", cwd=tmp_path)
    assert said.returncode == 1, said.stderr
    (found,) = json.loads(said.stdout)["brokers"][0]["differences"]
    assert (found["kind"], found["stored"], found["lost_at"]) == ("lost", ["other"], ["mom"])
    words = saf("reconcile", cwd=tmp_path).stdout.split()
    assert "stored at other, and lost at mom" in " ".join(words)
    assert "1 for mom to be sent again" in saf("rebase", cwd=tmp_path).stdout
    run(app, mom=older, other=other)
    assert bodies(older) == bodies(other) == ["0", "1"]
    assert saf("reconcile", cwd=tmp_path).returncode == 0


def test_a_store_that_has_nothing_of_the_topic_any_more_gets_all_of_it(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    """Also what was sent by a transaction that ended after newer messages had arrived."""
    subscribe(app, "mom", "other")
    with connect(app) as late:
        with late.transaction():
            Outbox().send(late, "news", "before", key="k")
            older = backup(mom)
            tell(app, "now")
            run(app, mom=mom, other=other)
        run(app, mom=mom, other=other)
    assert again(app, mom=older, other=other) == {"mom": 2}
    run(app, mom=older, other=other)
    assert bodies(older) == ["before", "now"], "in the order of their ids"


def test_what_a_long_transaction_sent_is_sent_again_though_it_began_before_the_backup(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    subscribe(app, "mom", "other")
    tell(app, "first")
    with connect(app) as late:
        with late.transaction():
            Outbox().send(late, "news", "late", key="k")
            tell(app, "second")
            run(app, mom=mom, other=other)
            older = backup(mom)
        run(app, mom=mom, other=other)
    assert again(app, mom=older, other=other) == {"mom": 1}
    run(app, mom=older, other=other)
    assert bodies(older) == ["first", "second", "late"]


def test_a_new_subscriber_that_was_set_back_is_not_flooded_with_an_old_topic(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    """Neither one that has something of the topic, nor one that has nothing."""
    subscribe(app, "other")
    tell(app, *range(5))
    run(app, mom=mom, other=other)
    empty = backup(mom)
    subscribe(app, "mom")
    tell(app, 5)
    run(app, mom=mom, other=other)
    older = backup(mom)
    tell(app, 6)
    run(app, mom=mom, other=other)
    found = reconcile("app", app, stores(mom=empty, other=other), retention_seconds=3600)
    assert found.counts == {"lost": 2, "uncertain": 5}
    assert again(app, mom=older, other=other) == {"mom": 1}
    run(app, mom=older, other=other)
    assert bodies(older) == ["5", "6"]


FORGET = """
INSERT INTO saf.route_version (routes, topics, routers, brokers)
SELECT routes, topics, routers, brokers FROM saf.route_version ORDER BY version DESC LIMIT 1;
UPDATE saf.cursor SET route_version = (SELECT max(version) FROM saf.route_version);
DELETE FROM saf.route_version WHERE version < (SELECT max(version) FROM saf.route_version)
"""
MADE_ANEW = "UPDATE saf.route SET created_at = now(); UPDATE saf.topic SET created_at = now()"


@pytest.mark.parametrize("made_anew", [False, True])
def test_since_when_a_store_gets_a_topic_is_known_also_where_the_first_routes_are_forgotten(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup, made_anew: bool
) -> None:
    """By when its route was made; or, where that was later, by what it still has."""
    subscribe(app, "mom", "other")
    older = backup(mom)
    tell(app, 0)
    run(app, mom=mom, other=other)
    if made_anew:
        older = backup(mom)
    tell(app, 1)
    run(app, mom=mom, other=other)
    with connect(app) as connection:
        connection.execute(FORGET)
        if made_anew:
            connection.execute(MADE_ANEW)
    again(app, mom=older, other=other)
    run(app, mom=older, other=other)
    assert bodies(older) == bodies(other) == ["0", "1"]


def test_copies_of_a_store_that_gets_the_topic_no_longer_are_said_to_be_uncertain(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup, tmp_path: Path
) -> None:
    """Its route is gone, and nobody knows which messages went there last."""
    subscribe(app, "mom", "other")
    tell(app, 0)
    run(app, mom=mom, other=other)
    older = backup(mom)
    tell(app, 1)
    run(app, mom=mom, other=other)
    with connect(app) as connection:
        remove_route(connection, "mom", service="news")
    tell(app, 2)
    run(app, mom=mom, other=other)
    tell(app, 3)
    run(app, mom=mom, other=other)
    found = reconcile("app", app, stores(mom=older, other=other), retention_seconds=3600)
    assert found.counts["lost"] == 0
    assert 1 <= found.counts["uncertain"] <= 2, "3 was sent when other routes were in use"
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": older, "other": other})
    words = " ".join(saf("reconcile", cwd=tmp_path).stdout.split())
    assert "of topics may have lost a copy" in words
    words = saf("rebase", cwd=tmp_path).stdout
    assert "of topics may be lost at mom, and not sent again" in words
    run(app, mom=older, other=other)
    assert bodies(older) == ["0"]


def test_what_is_lost_and_has_no_route_any_more_is_said_by_the_repair(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    with connect(app) as connection:
        add_route(connection, "mom", service="news")
    tell(app, 0)
    run(app, mom=mom)
    older = backup(mom)
    tell(app, 1)
    run(app, mom=mom)
    with connect(app) as connection:
        remove_route(connection, "mom", service="news")
    sent = send_again("app", app, stores(mom=older), current_routes, retention_seconds=3600)
    assert sent is not None
    assert "nothing sent again; 1 message more lost, and not sent again" in in_words(sent)
    found = reconcile("app", app, stores(mom=older), retention_seconds=3600)
    assert found.counts["lost"] == 1


def test_what_is_addressed_to_another_broker_is_no_copy_that_is_lost(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    subscribe(app, "mom", "other")
    with connect(other) as store:
        ((there,),) = fetch(store, "SELECT broker_id FROM saf.broker")
    tell(app, 0)
    run(app, mom=mom, other=other)
    older = backup(mom)
    tell(app, 1)
    tell(app, "", to_broker=there)
    run(app, mom=mom, other=other)
    assert bodies(other) == ["0", "1", ""]
    assert again(app, mom=older, other=other) == {"mom": 1}


def test_messages_of_routes_that_share_are_no_copies_though_their_service_was_a_topic(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    subscribe(app, "mom", "other")
    tell(app, "copied")
    run(app, mom=mom, other=other)
    with connect(app) as connection:
        remove_topic(connection, "news")
    older = backup(mom)
    tell(app, *range(100), key=None)
    run(app, mom=mom, other=other)
    went = len(bodies(mom)) - 1
    assert 0 < went < 100
    assert again(app, mom=older, other=other) == {"mom": went}


def test_a_copy_is_lost_also_while_another_stores_is_parked(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    subscribe(app, "mom", "other")
    tell(app, 0)
    run(app, mom=mom, other=other)
    older = backup(mom)
    tell(app, 1)
    nowhere = Dsn("host=/nonexistent dbname=mom")
    with Cycle(app, forwarding_rules(mom=mom, other=nowhere)) as cycle:
        cycle.run()
    assert bodies(mom) == ["0", "1"]
    assert again(app, mom=older, other=other) == {"mom": 1}
    let_time_pass(app)
    run(app, mom=older, other=other)
    assert bodies(older) == bodies(other) == ["0", "1"]


def test_what_was_given_up_for_one_store_is_sent_again_to_another_that_has_lost_it(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    """And what was given up before the backup is not."""
    with connect(other) as store:
        store.execute("ALTER TABLE saf.inbox ADD CHECK (body <> 'bad')")
    subscribe(app, "mom", "other")

    def given_up() -> None:
        tell(app, "bad")
        run(app, mom=mom, other=other)
        with connect(app) as connection:
            assert len(decide.discard(connection, DeadLetters(), "")) == 1

    given_up()
    tell(app, "good")
    run(app, mom=mom, other=other)
    older, elder = backup(mom), backup(other)
    given_up()
    assert again(app, mom=older, other=other) == {"mom": 1}
    run(app, mom=older, other=other)
    assert bodies(older) == ["bad", "good", "bad"]
    tell(app, "better")
    run(app, mom=older, other=other)
    assert again(app, mom=older, other=elder) == {"other": 2}, "and is a dead letter again"


def test_what_a_router_led_to_a_topic_is_sent_again_under_the_topics_name(
    app: Dsn, mom: Dsn, other: Dsn, backup: Backup
) -> None:
    subscribe(app, "mom", "other")
    with connect(app) as connection:
        add_router(connection, "any", "arrow", "tests.classifiers:by_body")
    older = backup(mom)
    tell(app, "news", service="any")
    run(app, mom=mom, other=other)
    assert again(app, mom=older, other=other) == {"mom": 1}
    run(app, mom=older, other=other)
    for store in (older, other):
        assert bodies(store) == ["news"]
    with connect(older) as connection:
        assert fetch(connection, "SELECT to_service FROM saf.inbox") == [("news",)]


def test_a_forwarder_at_work_does_not_make_a_store_look_set_back(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(app, 0)
    run(app, mom=mom)

    ask = Postgresql.known

    def look(there: Postgresql, name: str, source: UUID, *, role: str) -> Known:
        known = ask(there, name, source, role=role)
        tell(app, 1)
        run(app, mom=mom)
        return known

    monkeypatch.setattr(Postgresql, "known", look)
    sent = send_again(
        "app", app, stores(mom=mom), lambda one: current_routes(one, "mom"), retention_seconds=3600
    )
    assert sent is None
