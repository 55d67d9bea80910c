"""Who was set back is refused at the next contact, and repaired: sources and MOM stores."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.destinations.postgresql import known_at
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.errors import Unavailable, UsageError
from saf.failpoints import arm
from saf.forwarding.runner import run_item
from saf.log.cursor import TIMES
from saf.operating.decide import discard, redirect
from saf.operating.repair.rebase import rebase
from saf.operating.repair.send_again import Sent, send_again
from saf.routing.routes import current_routes
from saf.setaside.selection import DeadLetters, ParkedMessages
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    forwarding_rules,
    let_time_pass,
    run,
    send,
    stores,
)
from tests.programs import configuration, saf

Backup = Callable[[Dsn], Dsn]


def refused(app: Dsn, **destinations: Dsn) -> set[str]:
    """The errors of one cycle of a forwarder."""
    with Cycle(app, forwarding_rules(**destinations)) as cycle:  # type: ignore[arg-type]
        return {f"{r.error_kind}: {r.error}" for r in cycle.run() if r.error_kind}


def send_numbers(app: Dsn, *numbers: int, keys: int = 7) -> None:
    with connect(app) as connection:
        for number in numbers:
            send(connection, str(number), key=str(number % keys))


def numbers(mom: Dsn) -> list[int]:
    return sorted(map(int, bodies(mom)))


def in_order(mom: Dsn, keys: int = 7) -> bool:
    for key in range(keys):
        mine = [int(body) for body in bodies(mom) if int(body) % keys == key]
        if mine != sorted(mine):
            return False
    return True


def repair_source(app: Dsn, **destinations: Dsn) -> object:
    known = {}
    with connect(app) as connection:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        for name, dsn in destinations.items():
            with connect(dsn) as store:
                known[name] = known_at(store, source)
        return rebase(connection, known)


def repair_store(app: Dsn, **destinations: Dsn) -> Sent | None:
    return send_again(
        "app",
        app,
        stores(**destinations),
        lambda source: current_routes(source, next(iter(destinations))),
        retention_seconds=3600,
    )


def incarnation(dsn: Dsn) -> int:
    with connect(dsn) as connection:
        return int(fetch(connection, "SELECT incarnation FROM saf.broker")[0][0])


# --- a MOM store that was set back


@pytest.mark.parametrize("quality", ["exactly_once", "at_least_once", "at_most_once"])
def test_a_store_set_back_is_noticed_at_the_next_chunk_and_gets_what_it_lost_once(
    app: Dsn, mom: Dsn, backup: Backup, quality: str
) -> None:
    rules = forwarding_rules(quality, mom=mom)
    send_numbers(app, *range(10))
    with Cycle(app, rules) as cycle:
        cycle.run()
    older = backup(mom)
    send_numbers(app, *range(10, 13))
    with Cycle(app, rules) as cycle:
        cycle.run()
    assert numbers(mom) == list(range(13))
    send_numbers(app, 13)
    with Cycle(app, forwarding_rules(quality, mom=older)) as cycle:
        kinds = {r.error_kind: r.error for r in cycle.run() if r.error_kind}
    assert set(kinds) == {"Behind"}
    assert "saf rebase" in str(kinds["Behind"])
    if quality == "at_most_once":  # nothing of it left, and a person decides
        with connect(app) as connection:
            ((reason, error),) = fetch(connection, "SELECT reason, error FROM saf.dead_letter")
        assert reason == "unavailable"
        assert "saf rebase" in error
    assert numbers(older) == list(range(10)), "nothing was written"
    sent = repair_store(app, mom=older)
    assert sent is not None
    assert {name: len(ids) for name, ids in sent.by_destination.items()} == {"mom": 3}
    let_time_pass(app)
    run(app, mom=older)
    assert numbers(older) == list(range(13 if quality == "at_most_once" else 14))
    assert in_order(older)


def test_a_replay_of_a_range_does_not_let_a_store_go_on_that_was_set_back(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    rules = forwarding_rules("exactly_once", mom=mom)
    send_numbers(app, *range(5))
    with Cycle(app, rules) as cycle:
        cycle.run()
    older = backup(mom)
    send_numbers(app, *range(5, 8))
    with Cycle(app, rules) as cycle:
        cycle.run()
    with pytest.raises(UsageError, match=r"mom had been set back.* without --until"):
        send_again(
            "app", app, stores(mom=older), lambda source: current_routes(source, "mom"),
            retention_seconds=3600, until=datetime.now(UTC) - timedelta(hours=1),
            only_if_set_back=False,
        )  # fmt: skip
    send_numbers(app, 8)
    with Cycle(app, forwarding_rules("exactly_once", mom=older)) as cycle:
        assert {receipt.error_kind for receipt in cycle.run()} >= {"Behind"}
    assert repair_store(app, mom=older) is not None
    let_time_pass(app)
    run(app, mom=older)
    assert numbers(older) == list(range(9))


def test_a_store_set_back_does_not_hold_up_the_messages_for_others(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], backup: Backup
) -> None:
    other = new_broker("other")
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('billing', 'mom'), "
            "('shipping', 'other')"
        )
    send_numbers(app, 0)
    run(app, mom=mom, other=other)
    older = backup(mom)
    send_numbers(app, 1)
    run(app, mom=mom, other=other)
    send_numbers(app, 2)
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('shipping', 'on')")
    errors = refused(app, mom=older, other=other)
    assert {error.partition(":")[0] for error in errors} == {"Behind"}
    assert bodies(other) == ["on"]
    repair_store(app, mom=older, other=other)
    run(app, mom=older, other=other)
    assert bodies(older) == ["0", "1", "2"]
    assert bodies(other) == ["on"]


def test_the_repair_of_a_store_raises_its_incarnation_once_and_says_the_shards_and_number(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    older = backup(mom)
    send_numbers(app, *range(200), keys=200)
    run(app, mom=mom)
    send_numbers(app, 200)
    (error,) = refused(app, mom=older)
    assert "shards 0-" in error
    sent = repair_store(app, mom=older)
    assert sent is not None
    assert len(sent.by_destination["mom"]) == 200
    assert sent.set_back == ("mom",)
    raised = incarnation(older)
    assert raised > 1
    assert repair_store(app, mom=older) is None
    assert incarnation(older) == raised


def test_the_refusal_of_a_store_names_what_was_acknowledged_and_what_it_has(
    app: Dsn, mom: Dsn, backup: Backup, tmp_path: Path
) -> None:
    newest = "SELECT shard, batch, position FROM saf.acknowledged ORDER BY batch DESC LIMIT 1"
    marks, backups = [], [backup(mom)]
    for number in range(2):
        send_numbers(app, number, keys=1)
        run(app, mom=mom)
        backups.append(backup(mom))
        with connect(app) as connection:
            marks += fetch(connection, newest)
    send_numbers(app, 2, keys=1)
    never, older, _ = backups
    (shard, batch, position), (_, new_batch, new_position) = marks
    had = f"for example: of shard {shard} it had batch {new_batch} up to {new_position}, and has "
    for store, has in ((older, f"batch {batch} up to {position}"), (never, "nothing")):
        (error,) = refused(app, mom=store)
        assert had + has in error
        let_time_pass(app)
        configuration(tmp_path / "saf.toml", {"app": app}, {"mom": store})
        found = json.loads(saf("doctor", "--json", cwd=tmp_path).stdout)["findings"]
        (finding,) = [one for one in found if one["check"] == "set_back"]
        assert had + has in finding["what"]
    assert shard != 0
    assert 0 < position < new_position


def test_a_store_set_back_in_the_middle_of_a_batch_is_noticed(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    send_numbers(app, *range(10), keys=1)
    rules = forwarding_rules(mom=mom, chunk_rows=2)
    with Cycle(app, rules) as cycle:
        cycle.open()
        with connect(app) as connection:
            connection.execute("UPDATE saf.member SET stopping = true")
        cycle.deliver()  # one chunk
    older = backup(mom)
    with Cycle(app, rules) as cycle:
        cycle.open()
        with connect(app) as connection:
            connection.execute("UPDATE saf.member SET stopping = true")
        cycle.deliver()
    assert numbers(mom) == [0, 1, 2, 3]
    assert {error.partition(":")[0] for error in refused(app, mom=older)} == {"Behind"}
    repair_store(app, mom=older)
    let_time_pass(app)
    run(app, mom=older)
    assert numbers(older) == list(range(10))


# --- a source that was set back


@pytest.mark.parametrize("service", [False, True])
def test_a_source_set_back_that_hosts_a_service_has_a_way_out(
    app: Dsn, mom: Dsn, backup: Backup, service: bool
) -> None:
    if service:
        with connect(app) as connection:
            connection.execute(
                "INSERT INTO saf.subscription (name, log) VALUES ('reader', 'inbox');"
                "INSERT INTO saf.cursor (subscription_id, shard, batch)"
                " SELECT subscription_id, generate_series(0, 63), 1000"
                " FROM saf.subscription WHERE name = 'reader'"
            )
    send_numbers(app, 0)
    run(app, mom=mom)
    older = backup(app)
    send_numbers(app, 1)
    run(app, mom=mom)
    send_numbers(older, 2)
    (error,) = refused(older, mom=mom)
    assert error.startswith("Ahead")
    assert "saf rebase" in error
    assert repair_source(older, mom=mom) is not None
    run(older, mom=mom)
    assert numbers(mom) == [0, 1, 2]
    assert repair_source(older, mom=mom) is None


def test_a_source_set_back_is_noticed_where_the_batches_of_two_forwarders_hide_it(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    """One of them had got far, with shards in which nothing was sent."""
    with connect(app) as connection:
        send(connection, "0", key="k")
        ((shard,),) = fetch(connection, "SELECT shard FROM saf.outbox")
        connection.execute("UPDATE saf.cursor SET batch = 50 WHERE shard <> %s", (shard,))
    older = backup(app)
    with (
        Cycle(app, forwarding_rules(mom=mom)) as one,
        Cycle(app, forwarding_rules(mom=mom)) as other,
    ):
        for cycle in (one, other):
            cycle.broker.tend()
        assert one.broker._member is not None
        assert other.broker._member is not None
        with connect(app) as connection:
            connection.execute(
                "UPDATE saf.cursor SET owner = CASE shard WHEN %s THEN %s ELSE %s END",
                (shard, one.broker._member.member_id, other.broker._member.member_id),
            )
        one.run()
    assert bodies(mom) == ["0"]
    assert {error.partition(":")[0] for error in refused(older, mom=mom)} == {"Ahead"}
    assert bodies(mom) == ["0"], "nothing was stored twice"
    assert repair_source(older, mom=mom) is not None


def test_what_had_waited_for_a_route_is_not_dropped_after_the_source_was_set_back(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    add_route = "INSERT INTO saf.route (service, destination) VALUES ('billing', 'mom')"

    def waits_and_goes(source: Dsn) -> None:
        rules = forwarding_rules(mom=mom)
        with Cycle(source, rules) as cycle:
            cycle.default = None
            cycle.run()
        with connect(source) as connection:
            connection.execute(add_route)
        let_time_pass(source)

    older = backup(app)
    send_numbers(app, *range(7))
    waits_and_goes(app)
    run(app, mom=mom)
    assert numbers(mom) == list(range(7))
    send_numbers(older, *range(100, 107))
    waits_and_goes(older)
    errors = refused(older, mom=mom)
    assert {error.partition(":")[0] for error in errors} == {"Ahead"}
    assert repair_source(older, mom=mom) is not None
    let_time_pass(older)
    run(older, mom=mom)
    assert numbers(mom) == [*range(7), *range(100, 107)]


@pytest.mark.slow
def test_what_is_retried_is_not_dropped_after_the_source_was_set_back(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    from saf.operating.decide import retry

    late = """
        INSERT INTO saf.outbox (to_service, key, body, expires_at)
        VALUES ('billing', 'A-1', %s, now())
    """

    def dies_and_is_retried(source: Dsn, body: str) -> None:
        with connect(source) as connection:
            connection.execute(late, (body.encode(),))
            run(source, mom=mom)
            assert retry(connection, DeadLetters(), "") != []

    send_numbers(app, 0)
    run(app, mom=mom)
    older = backup(app)
    for number in (1, 2):
        dies_and_is_retried(app, str(number))
        run(app, mom=mom)
    assert bodies(mom) == ["0", "1", "2"]
    # another destination's repair, which would not help here, aside: only the lane knows
    with connect(older) as connection:
        connection.execute("UPDATE saf.cursor SET batch = batch + 100")
        connection.execute(late, (b"3",))
        with Cycle(older, forwarding_rules(mom=mom)) as cycle:
            cycle.run()
        retry(connection, DeadLetters(), "")
    assert {error.partition(":")[0] for error in refused(older, mom=mom)} == {"Ahead"}
    assert repair_source(older, mom=mom) is not None
    run(older, mom=mom)
    assert bodies(mom) == ["0", "1", "2", "3"]


def in_hand_at_the_backup(app: Dsn, mom: Dsn, backup: Backup) -> Dsn:
    """Three messages are: two are stored since, and the one between them, "waits", is parked."""
    with connect(mom) as connection:
        create_service(connection, "billing")
    sent = "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, 'k', %s)"
    with connect(app) as connection:
        for service, body in (("billing", "1"), ("shipping", "waits"), ("billing", "2")):
            connection.execute(sent, (service, body.encode()))
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.open()
    older = backup(app)
    run(app, mom=mom)
    assert bodies(mom) == ["1", "2"]
    return older


def test_what_was_in_hand_at_the_backup_and_set_aside_after_it_is_not_dropped(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    """The mark of its shard has passed it, and looks as if only an answer had got lost."""
    older = in_hand_at_the_backup(app, mom, backup)
    send_numbers(app, 3)
    run(app, mom=mom)
    with connect(mom) as connection:  # as of a source that has set messages aside so often since
        connection.execute("UPDATE saf.watermark SET set_aside_at = NULL")
    send_numbers(older, 10)  # of the shard that had another batch after the backup
    with connect(older) as connection:  # so that only that shard's mark tells
        connection.execute("UPDATE saf.cursor SET epoch = epoch + 10")
    assert {error.partition(":")[0] for error in refused(older, mom=mom)} == {"Ahead"}
    assert repair_source(older, mom=mom) is not None
    with connect(mom) as connection:
        create_service(connection, "shipping")
    run(older, mom=mom)
    assert sorted({*bodies(mom)}) == ["1", "10", "2", "3", "waits"]


LONG_BEFORE = (
    f"""ARRAY(SELECT now() - n * interval '1 day' FROM generate_series({TIMES}, 1, -1) AS n)"""
)


@pytest.mark.parametrize("remembered", ["NULL", "ARRAY[now()]", LONG_BEFORE])
def test_a_set_back_that_only_what_was_set_aside_since_shows_is_noticed(
    app: Dsn, mom: Dsn, backup: Backup, remembered: str
) -> None:
    """Also if the restored source remembers others, from before or after it was restored."""
    older = in_hand_at_the_backup(app, mom, backup)
    with connect(mom) as connection:
        create_service(connection, "shipping")
    with connect(older) as connection:
        connection.execute(f"UPDATE saf.cursor SET set_aside_at = {remembered}".encode())
    assert {error.partition(":")[0] for error in refused(older, mom=mom)} == {"Ahead"}
    assert bodies(mom) == ["1", "2"]
    assert repair_source(older, mom=mom) is not None
    run(older, mom=mom)
    assert sorted({*bodies(mom)}) == ["1", "2", "waits"]
    assert repair_source(older, mom=mom) is None
    with connect(older) as connection:
        ((most,),) = fetch(connection, "SELECT max(cardinality(set_aside_at)) FROM saf.cursor")
    assert most <= TIMES


def parked_at_the_backup(app: Dsn, mom: Dsn, backup: Backup) -> Dsn:
    """Two messages are, of a service that the store gets to know after it."""
    with connect(mom) as connection:
        create_service(connection, "shipping")
    send_numbers(app, 1, 2, keys=1)
    run(app, mom=mom)
    older = backup(app)
    with connect(mom) as connection:
        create_service(connection, "billing")
    return older


def refuses_until_repaired(older: Dsn, mom: Dsn) -> None:
    """What was parked at the backup is tried, refused, and arrives after the repair."""
    let_time_pass(older)
    assert {error.partition(":")[0] for error in refused(older, mom=mom)} == {"Ahead"}
    assert repair_source(older, mom=mom) is not None
    let_time_pass(older)
    run(older, mom=mom)
    assert sorted({*bodies(mom)}) == ["1", "2"]


def test_a_set_back_that_only_a_dead_letter_shows_which_was_parked_at_the_backup_is_noticed(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    older = parked_at_the_backup(app, mom, backup)
    with connect(mom) as connection:
        connection.execute("ALTER TABLE saf.inbox ADD CONSTRAINT no_one CHECK (body <> '1')")
        let_time_pass(app)
        run(app, mom=mom)
        connection.execute("ALTER TABLE saf.inbox DROP CONSTRAINT no_one")
    assert bodies(mom) == ["2"]
    refuses_until_repaired(older, mom)


@pytest.mark.parametrize("in_hand", [False, True])  # of a forwarder, when the person decides
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_set_back_is_noticed_that_only_shows_in_what_a_person_decided_about_parked_messages(
    app: Dsn, mom: Dsn, backup: Backup, elsewhere: bool, in_hand: bool
) -> None:
    older = parked_at_the_backup(app, mom, backup)
    let_time_pass(app)
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        work = cycle.open() if in_hand else []
        with connect(app) as connection:
            first = ParkedMessages()
            if elsewhere:
                gone = redirect("other")(connection, first, "moved", limit=1)
            else:
                gone = discard(connection, first, "not needed", limit=1)
            assert len(gone) == 1
        for item in work or cycle.open():
            run_item(0, item, cycle.rules, closes=True)
    assert bodies(mom) == ["2"]
    refuses_until_repaired(older, mom)


def test_a_source_that_a_dump_had_brought_sends_nothing_again_that_had_arrived_before_its_backup(
    app: Dsn, mom: Dsn, backup: Backup
) -> None:
    """Its cursors are right where it was only set back, also for what it sent since the dump."""
    with connect(app) as connection:
        connection.execute("DELETE FROM saf.timeline")
        connection.execute("INSERT INTO saf.timeline (written) VALUES ('10')")
    send_numbers(app, 0)
    run(app, mom=mom)
    older = backup(app)
    send_numbers(app, 7)
    run(app, mom=mom)
    send_numbers(older, 14)
    (error,) = refused(older, mom=mom)
    assert error.startswith("Ahead")
    assert repair_source(older, mom=mom) is not None
    run(older, mom=mom)
    assert numbers(mom) == [0, 7, 14]


# --- and nothing else is taken for one


def test_an_answer_that_got_lost_is_no_alarm_whoever_goes_on(app: Dsn, mom: Dsn) -> None:
    original = PostgresInbox.store
    losing = True

    def lose(self: PostgresInbox, chunk: Any, *, exactly_once: bool) -> Any:
        stored = original(self, chunk, exactly_once=exactly_once)
        if losing:
            raise Unavailable("destination 'mom'", "the answer got lost")
        return stored

    patch = pytest.MonkeyPatch()
    patch.setattr(PostgresInbox, "store", lose)
    with connect(app) as connection:
        # not the only one, so that what cannot go is parked
        connection.execute("INSERT INTO saf.route (destination) VALUES ('mom')")
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('nobody', 'nowhere')"
        )
    try:
        for number in range(4):
            send_numbers(app, number)
            with Cycle(app, forwarding_rules(mom=mom)) as cycle:
                cycle.run()
            let_time_pass(app)
        losing = False
        run(app, mom=mom)
    finally:
        patch.undo()
    assert numbers(mom) == [0, 1, 2, 3]
    with connect(app) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []


@pytest.mark.parametrize("quality", ["exactly_once", "at_least_once", "at_most_once"])
@pytest.mark.parametrize("point", ["mom_commit", "mark_forwarded", "mark_commit"])
def test_a_crash_is_no_alarm_whoever_goes_on(app: Dsn, mom: Dsn, quality: str, point: str) -> None:
    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    for number in range(3):
        send_numbers(app, number)
        with Cycle(app, forwarding_rules(quality, mom=mom)) as cycle:
            cycle.open()
            arm(point, crash)
            try:
                cycle.deliver()
            except Crash:
                pass
            finally:
                arm("")
        with Cycle(app, forwarding_rules(quality, mom=mom)) as cycle:
            while receipts := cycle.run():
                assert not [r.error for r in receipts if r.error]
    assert set(numbers(mom)) == {0, 1, 2}


@pytest.mark.slow
def test_a_quiet_destination_and_a_new_one_and_another_quality_are_no_alarm(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    other = new_broker("other")
    with connect(app) as connection:
        for number in range(9):
            destination, quality = [
                ("mom", "exactly_once"), ("other", "at_least_once"), ("mom", "at_least_once"),
            ][number % 3]  # fmt: skip
            connection.execute("DELETE FROM saf.route")
            connection.execute(
                "INSERT INTO saf.route (destination, quality) VALUES (%s, %s)",
                (destination, quality),
            )
            send(connection, str(number), key=str(number % 2))
            run(app, mom=mom, other=other)
    assert sorted(numbers(mom) + numbers(other)) == list(range(9))


@pytest.mark.slow
def test_an_acknowledgement_is_one_row_for_each_shard_that_has_sent_and_costs_no_more(
    app: Dsn, mom: Dsn
) -> None:
    for number in range(20):
        send_numbers(app, number, keys=2)
        run(app, mom=mom)
    with connect(app) as connection, connect(mom) as store:
        ours = fetch(
            connection, "SELECT shard, batch, position, opened_at FROM saf.acknowledged ORDER BY 1"
        )
        theirs = fetch(
            store,
            "SELECT shard, batch, position, opened_at FROM saf.watermark WHERE batch > 0"
            " ORDER BY 1",
        )
    assert len(ours) == 2
    assert ours == theirs


def test_both_sides_set_back_to_the_same_moment_go_on(app: Dsn, mom: Dsn, backup: Backup) -> None:
    send_numbers(app, 0)
    run(app, mom=mom)
    old_app, old_mom = backup(app), backup(mom)
    send_numbers(app, 1)
    run(app, mom=mom)
    send_numbers(old_app, 2)
    run(old_app, mom=old_mom)
    assert numbers(old_mom) == [0, 2]


# --- replay by two people


def test_two_who_replay_at_once_send_each_message_once(app: Dsn, mom: Dsn) -> None:
    send_numbers(app, *range(50))
    run(app, mom=mom)
    with connect(mom) as store:
        store.execute("DELETE FROM saf.inbox WHERE id % 5 = 0")
    found: list[object] = []
    both = threading.Barrier(2)

    def person() -> None:
        both.wait()
        found.append(
            send_again(
                "app",
                app,
                stores(mom=mom),
                lambda source: current_routes(source, "mom"),
                retention_seconds=3600,
                only_if_set_back=False,
            )
        )

    people = [threading.Thread(target=person) for _ in range(2)]
    for one in people:
        one.start()
    for one in people:
        one.join()
    run(app, mom=mom)
    assert numbers(mom) == list(range(50))


# --- the commands


@pytest.mark.slow
def test_the_commands_name_what_a_store_has_lost_and_bring_exactly_that(
    app: Dsn, mom: Dsn, backup: Backup, tmp_path: Path
) -> None:
    send_numbers(app, *range(10))
    run(app, mom=mom)
    older = backup(mom)
    send_numbers(app, *range(10, 15))
    run(app, mom=mom)
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": older})

    lost = json.loads(saf("reconcile", "--json", cwd=tmp_path).stdout)["brokers"][0]["lost"]
    assert lost == 5
    found = json.loads(saf("doctor", "--json", cwd=tmp_path).stdout)["findings"]
    (finding,) = [one for one in found if one["check"] == "set_back"]
    assert finding["severity"] == "error"
    assert "destination 'mom' has lost messages" in finding["what"]
    assert finding["cure"] == "saf rebase"

    said = saf("rebase", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "5 for mom to be sent again" in said.stdout
    assert "mom had been set back, and may continue" in said.stdout
    assert "sent again" not in saf("rebase", cwd=tmp_path).stdout
    run(app, mom=older)
    assert numbers(older) == list(range(15))
    assert saf("reconcile", cwd=tmp_path).returncode == 0
    found = json.loads(saf("doctor", "--json", cwd=tmp_path).stdout)["findings"]
    assert [one["severity"] for one in found if one["check"] == "set_back"] == ["ok"]


@pytest.mark.slow
def test_the_doctor_says_what_a_source_that_was_set_back_would_meet(
    app: Dsn, mom: Dsn, backup: Backup, tmp_path: Path
) -> None:
    send_numbers(app, 0)
    run(app, mom=mom)
    older = backup(app)
    send_numbers(app, 0)
    run(app, mom=mom)
    configuration(tmp_path / "saf.toml", {"app": older}, {"mom": mom})
    found = json.loads(saf("doctor", "--json", cwd=tmp_path).stdout)["findings"]
    (finding,) = [one for one in found if one["check"] == "set_back"]
    assert "has stored more of shard" in finding["what"]
    assert saf("rebase", cwd=tmp_path).returncode == 0
    found = json.loads(saf("doctor", "--json", cwd=tmp_path).stdout)["findings"]
    assert [one["severity"] for one in found if one["check"] == "set_back"] == ["ok"]


def test_what_a_restored_broker_says_of_itself_is_refused_and_not_zero(
    app: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        connection.execute("UPDATE saf.broker SET system_identifier = 1")
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": app})
    for command in (["status"], ["inbox", "status"]):
        done = saf(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert "saf rebase" in done.stderr
    assert saf("rebase", cwd=tmp_path).returncode == 0
    assert saf("status", cwd=tmp_path).returncode == 0
