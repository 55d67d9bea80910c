"""A dialog whose one end was set back goes on without a gap or a repeat, or fails at both ends."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta

import pytest

import saf
from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn, fetch
from saf.dialogs.conversations import fail
from saf.dialogs.statements import Code
from saf.errors import DialogEnded
from saf.testing.clock import let_time_pass
from tests.conftest import Prepared
from tests.dialogs import END, ERROR, SHOP, TIMER, WAREHOUSE, end, put, receive, said
from tests.pipeline import connect
from tests.set_backs import Two, begin_monolog, dump, load, publish


@pytest.fixture
def two(app: Dsn, mom: Dsn, migrated: Prepared) -> Iterator[Two]:
    made = Two.at(app, mom, migrated.databases)
    yield made
    for place in (made.shop, made.warehouse):
        for copy in place.copies:
            migrated.databases.drop(copy)


@pytest.mark.slow
def test_what_an_initiator_that_was_set_back_says_anew_is_not_taken_for_repeats(two: Two) -> None:
    dialog = two.begin("1", "2")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "3", "4", "5")
    two.talk()
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.shop.says(dialog, "new 3", "new 4", "new 5", "new 6")
    two.talk()
    here, there = two.errors(dialog.conversation_id)
    assert here == there
    assert "messages 3 to 5 were received" in here
    assert two.warehouse.remembers(dialog.conversation_id, said=False) == [
        *"12345",
        str(Code.SET_BACK.value),
    ]


@pytest.mark.full
@pytest.mark.slow
def test_an_initiator_whose_messages_had_not_arrived_goes_on_where_it_was(two: Two) -> None:
    dialog = two.begin("1", "2")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "3", "4")
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.shop.says(dialog, "new 3")
    two.talk()
    two.warehouse.says(two.other_end(dialog), "yes")
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: True}


def test_an_initiator_of_whom_the_target_only_waits_is_found_to_have_forgotten(two: Two) -> None:
    """It never says anything more by itself."""
    dialog = two.begin("1")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "2")
    two.talk()
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}


@pytest.mark.full
@pytest.mark.slow
def test_what_was_said_between_the_restore_and_the_repair_is_not_taken_for_repeats(
    two: Two,
) -> None:
    dialog = two.begin("1", "2")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "3", "4")
    two.talk()
    two.shop.go_back(backup)
    two.shop.says(dialog, "new 3", "new 4", "new 5")
    two.repair(two.shop)
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}
    assert "messages 3 to 4 were received" in two.errors(dialog.conversation_id)[0]


@pytest.mark.parametrize("first", ["shop", "warehouse"])
def test_both_ends_name_all_numbers_that_stand_for_two_messages_where_few_were_sent_anew(
    two: Two, first: str
) -> None:
    """Whichever end hears of it first, from what the other one says of itself."""
    dialog = two.begin("1", "2")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "3", "4", "5")
    two.talk()
    two.shop.go_back(backup)
    two.shop.says(dialog, "new 3")
    two.repair(two.shop)
    two.carry()
    {"shop": two.shop, "warehouse": two.warehouse}[first].hears()
    two.talk()
    for error in two.errors(dialog.conversation_id):
        assert "messages 3 to 5 were received" in error


@pytest.mark.slow
def test_a_target_that_was_set_back_receives_again_what_it_has_lost(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.warehouse.backup()
    two.shop.says(dialog, "2", "3", "4")
    two.talk()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse)
    two.shop.says(dialog, "5")
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: True}
    assert two.warehouse.remembers(dialog.conversation_id, said=False) == [*"12345"]


@pytest.mark.slow
def test_a_target_that_has_lost_what_nobody_has_any_more_fails_at_both_ends(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.warehouse.backup()
    two.shop.says(dialog, "2", "3", "4")
    two.talk()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse, bring_back=False)
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}
    assert "messages 2 to 4 were sent" in two.errors(dialog.conversation_id)[0]


@pytest.mark.full
@pytest.mark.slow
def test_a_target_that_has_answered_and_forgotten_it_fails_at_both_ends(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.warehouse.backup()
    two.shop.says(dialog, "2")
    two.talk()
    two.warehouse.says(two.other_end(dialog), "answer to 2")
    two.talk()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse)
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}


@pytest.mark.slow
def test_both_ends_set_back_to_the_same_moment_go_on(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    backups = two.shop.backup(), two.warehouse.backup()
    two.shop.says(dialog, "2")
    two.talk()
    two.warehouse.says(two.other_end(dialog), "answer to 2")
    two.talk()
    for place, backup in zip((two.shop, two.warehouse), backups, strict=True):
        place.go_back(backup)
    for place in (two.shop, two.warehouse):
        two.repair(place)
    two.shop.says(dialog, "new 2")
    two.talk()
    two.warehouse.says(two.other_end(dialog), "answer to new 2")
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: True}


def test_a_dialog_that_its_initiator_has_no_memory_of_fails_at_the_target(two: Two) -> None:
    backup = two.shop.backup()
    dialog = two.begin("1")
    two.talk()
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.talk()
    assert dialog.conversation_id not in two.shop.ends()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}


def test_a_dialog_that_begins_after_its_initiator_was_set_back_to_before_it_fails(
    two: Two,
) -> None:
    backup = two.shop.backup()
    dialog = two.begin("1")
    two.carry()
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}


def test_a_dialog_that_its_target_has_no_memory_of_begins_anew_if_nothing_was_answered(
    two: Two,
) -> None:
    backup = two.warehouse.backup()
    dialog = two.begin("1", "2")
    two.talk()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse)
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: True}
    assert two.warehouse.remembers(dialog.conversation_id, said=False) == ["1", "2"]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("who_speaks", ["nobody", "initiator"])
def test_a_dialog_that_its_target_has_lost_for_good_fails_at_the_initiator(
    two: Two, answered: bool, who_speaks: str
) -> None:
    backup = two.warehouse.backup()
    dialog = two.begin("1", "2")
    two.talk()
    if answered:
        two.warehouse.says(two.other_end(dialog), "yes")
        two.talk()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse, bring_back=False)
    if who_speaks == "initiator":
        two.shop.says(dialog, "3")
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}


@pytest.mark.full
@pytest.mark.slow
def test_what_the_earlier_incarnation_said_and_comes_late_is_not_mixed_up_with_the_new(
    two: Two,
) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "2", "3")
    two.carry()
    with connect(two.warehouse.dsn) as connection:
        # 2 is late, so that 3 waits for it
        connection.execute("CREATE TABLE late AS SELECT * FROM saf.inbox WHERE sequence = 2")
        connection.execute("DELETE FROM saf.inbox WHERE sequence = 2")
    assert two.warehouse.hears() == []
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.shop.says(dialog, "new 2")
    two.carry()
    assert said(two.warehouse.hears()) == ["new 2"]
    with connect(two.warehouse.dsn) as connection:
        columns = "to_service, from_service, key, conversation_id, from_initiator, sequence, body"
        connection.execute(f"INSERT INTO saf.inbox ({columns}) SELECT {columns} FROM late")
    two.shop.says(dialog, "new 3")
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: True}
    assert two.warehouse.remembers(dialog.conversation_id, said=False) == ["1", "new 2", "new 3"]
    with connect(two.warehouse.dsn) as connection:
        gone = fetch(connection, "SELECT convert_from(body, 'UTF8'), error FROM saf.dead_letter")
    assert sorted(body for body, _ in gone) == ["2", "3"]
    assert all("before the other end was set back" in error for _, error in gone)


@pytest.mark.full
@pytest.mark.slow
def test_two_set_backs_to_the_same_backup_are_told_apart(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.shop.backup()
    for life in ("first", "second"):
        two.shop.go_back(backup)
        two.repair(two.shop)
        two.shop.says(dialog, f"2 of the {life} life")
        if life == "first":
            two.talk()
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}


@pytest.mark.full
@pytest.mark.slow
def test_a_backup_that_is_newer_than_the_last_one_but_of_another_life_does_not_seem_to_fit(
    two: Two,
) -> None:
    dialog = two.begin("1")
    two.talk()
    older = two.shop.backup()
    two.shop.says(dialog, "2", "3")
    newer = two.shop.backup()
    two.shop.go_back(older)
    two.repair(two.shop)
    two.shop.says(dialog, "another 2", "another 3")
    two.talk()
    two.shop.go_back(newer)
    two.repair(two.shop)
    two.shop.says(dialog, "4")
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: False}
    assert "messages 2 to 3 were received" in two.errors(dialog.conversation_id)[0]


def test_half_of_a_large_body_from_before_the_set_back_is_no_part_of_what_is_said_after(
    two: Two,
) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.shop.backup()
    with two.shop.dsn.connect(role="test") as connection:
        dialog.send(connection, b"old" * 4, fragment_bytes=3)
    two.carry()
    with connect(two.warehouse.dsn) as connection:
        connection.execute("DELETE FROM saf.inbox WHERE sequence = 2")
    assert two.warehouse.hears() == []
    two.shop.go_back(backup)
    two.repair(two.shop)
    with two.shop.dsn.connect(role="test") as connection:
        dialog.send(connection, b"NEW" * 4, fragment_bytes=3)
    two.carry()
    bodies: list[bytes] = []
    receive(two.warehouse.dsn, WAREHOUSE, lambda _, message: bodies.append(message.body))
    assert bodies == [b"NEW" * 4]
    assert two.errors(dialog.conversation_id) == ["", ""]


@pytest.mark.full
@pytest.mark.slow
def test_a_dialog_that_is_over_at_one_end_fails_at_the_other_one_that_was_set_back(
    two: Two,
) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.shop.backup()
    end(two.shop.dsn, dialog)
    two.talk()
    end(two.warehouse.dsn, two.other_end(dialog))
    two.talk()
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.talk()
    state, code, text = two.shop.ends()[dialog.conversation_id]
    assert (state, code) == ("error", Code.SET_BACK)
    assert "messages 2 to 2 were received" in (text or "")
    assert two.warehouse.ends()[dialog.conversation_id][0] == "closed"


def test_an_end_hears_that_it_had_failed_when_it_learns_that_the_other_one_was_set_back(
    two: Two,
) -> None:
    dialog = two.begin("1", "2")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "3")
    two.talk()
    with connect(two.warehouse.dsn) as connection:
        fail(connection, dialog.conversation_id, True, Code.GIVEN_UP, "message 4 was given up")
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.talk()
    assert two.warehouse.remembers(dialog.conversation_id, said=False) == [
        *"123",
        str(Code.GIVEN_UP.value),
    ]
    ends = [place.ends()[dialog.conversation_id][:2] for place in (two.shop, two.warehouse)]
    assert ends == [("error", Code.GIVEN_UP)] * 2


def test_a_dialog_that_failed_meanwhile_fails_at_the_end_that_was_set_back_too(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.shop.backup()
    with two.warehouse.dsn.connect(role="test") as connection:
        two.other_end(dialog).end_with_error(connection, 17, "no more")
    two.talk()
    two.shop.go_back(backup)
    two.repair(two.shop, bring_back=False)
    two.talk()
    state, code, text = two.shop.ends()[dialog.conversation_id]
    assert (state, code) == ("error", Code.SET_BACK)
    assert "no more" in (text or "")


def test_a_dialog_that_had_failed_fails_again_at_a_target_that_has_no_memory_of_it(
    two: Two,
) -> None:
    backup = two.warehouse.backup()
    dialog = two.begin("1")
    two.talk()
    with connect(two.shop.dsn) as connection:
        fail(connection, dialog.conversation_id, False, Code.GIVEN_UP, "message 1 was given up")
    two.talk()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse, bring_back=False)
    put(two.warehouse.dsn, dialog, 2, "2")
    two.talk()
    ends = [place.ends()[dialog.conversation_id][:2] for place in (two.shop, two.warehouse)]
    assert ends == [("error", Code.GIVEN_UP), ("error", Code.SET_BACK)]
    assert two.warehouse.remembers(dialog.conversation_id, said=False) == [str(Code.SET_BACK.value)]
    with connect(two.warehouse.dsn) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []


def test_the_state_of_a_group_and_its_timer_go_back_with_the_end(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    with two.shop.dsn.connect(role="test") as connection:
        dialog.start_timer(connection, 0)
        saf.set_group_state(connection, dialog, "waits")
    backup = two.shop.backup()
    assert said(receive(two.shop.dsn, SHOP)) == [TIMER]
    with two.shop.dsn.connect(role="test") as connection:
        saf.set_group_state(connection, dialog, "reminded")
    two.shop.go_back(backup)
    two.repair(two.shop)
    assert said(receive(two.shop.dsn, SHOP)) == [TIMER]
    with two.shop.dsn.connect(role="test") as connection:
        assert saf.group_state(connection, dialog) == "waits"
    two.shop.says(dialog, "2")
    two.talk()
    assert two.check([dialog.conversation_id]) == {dialog.conversation_id: True}


def test_the_lifetime_of_an_end_that_was_set_back_is_over_when_it_was_to_be(two: Two) -> None:
    dialog = two.begin("1", lifetime=600)
    two.talk()
    two.shop.go_back(two.shop.backup())
    two.repair(two.shop)
    two.talk()
    for place in (two.shop, two.warehouse):
        let_time_pass(place.dsn, timedelta(seconds=600))
        place.hears()
        assert place.ends()[dialog.conversation_id][:2] == ("error", Code.EXPIRED)


@pytest.mark.parametrize("more", [False, True])
def test_the_subscribers_of_a_monolog_whose_publisher_was_set_back_get_an_error(
    two: Two, more: bool
) -> None:
    with two.shop.dsn.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service=SHOP, topic=WAREHOUSE)
        monolog.send(connection, "1")
    two.carry()
    backup = two.shop.backup()
    if more:
        with two.shop.dsn.connect(role="test") as connection:
            monolog.send(connection, "2")
        two.carry()
    two.shop.go_back(backup)
    two.repair(two.shop)
    with two.shop.dsn.connect(role="test") as connection:
        if more:
            with pytest.raises(DialogEnded, match="no memory of what it had sent after message 1"):
                monolog.send(connection, "another 2")
        else:
            monolog.send(connection, "2")
    two.carry()
    assert said(receive(two.warehouse.dsn, WAREHOUSE)) == ["1", *["2"], *([ERROR] * more)]


def test_a_monolog_that_had_said_nothing_at_the_backup_ends_with_an_error_too(two: Two) -> None:
    other = begin_monolog(two, "of another one")
    two.carry()
    monolog = begin_monolog(two)
    backup = two.shop.backup()
    publish(two, monolog, "1", "2")
    two.carry()
    two.shop.go_back(backup)
    two.repair(two.shop)
    two.carry()
    heard = receive(two.warehouse.dsn, WAREHOUSE)
    assert said(heard) == ["of another one", "1", "2", ERROR, ERROR]
    assert {one.conversation_id for one in heard[3:]} == {
        monolog.conversation_id,
        other.conversation_id,
    }


def test_the_subscribers_of_a_monolog_that_its_publisher_has_forgotten_get_an_error(
    two: Two,
) -> None:
    backup = two.shop.backup()
    monolog = begin_monolog(two, "1", "2")
    over = begin_monolog(two, "all")
    end(two.shop.dsn, over)
    two.carry()
    two.shop.go_back(backup)
    for _ in range(2):
        two.repair(two.shop)
        two.carry()
    *messages, error = receive(two.warehouse.dsn, WAREHOUSE)
    assert sorted(said(messages)) == sorted(["1", "2", "all", END])
    assert (error.message_type, error.conversation_id) == (ERROR, monolog.conversation_id)
    assert error.sequence == 3
    assert error.json()["code"] == Code.SET_BACK
    assert "does not remember this monolog, and had sent 2" in error.json()["text"]


@pytest.mark.parametrize("bring_back", [True, False])
def test_subscribers_that_were_set_back_get_what_they_have_lost_or_an_error_in_its_place(
    two: Two, bring_back: bool
) -> None:
    monolog = begin_monolog(two, "1", "2")
    whole = begin_monolog(two, "whole")
    two.carry()
    backup = two.warehouse.backup()
    publish(two, monolog, "3", "4")
    two.carry()
    two.warehouse.go_back(backup)
    two.repair(two.warehouse, bring_back=bring_back)
    publish(two, monolog, "5")
    publish(two, whole, "and more")
    two.carry()
    heard = receive(two.warehouse.dsn, WAREHOUSE)
    mine = [one for one in heard if one.conversation_id == monolog.conversation_id]
    lost = ["3", "4"] if bring_back else [ERROR]
    assert said(mine) == ["1", "2", *lost, "5"]
    assert said([one for one in heard if one not in mine]) == ["whole", "and more"]
    if not bring_back:
        assert mine[2].json()["code"] == Code.SET_BACK
        assert "of messages 3 to 4, some are lost there" in mine[2].json()["text"]


@pytest.mark.full
@pytest.mark.slow
def test_a_repair_can_be_made_twice_and_nobody_is_told_twice(two: Two) -> None:
    dialog = two.begin("1")
    two.talk()
    backup = two.shop.backup()
    two.shop.says(dialog, "2")
    two.talk()
    two.shop.go_back(backup)
    for _ in range(2):
        two.repair(two.shop)
    two.talk()
    for place in (two.shop, two.warehouse):
        heard = place.remembers(dialog.conversation_id, said=False)
        assert heard.count(str(Code.SET_BACK.value)) == 1


@pytest.mark.full
@pytest.mark.slow
def test_a_dump_of_an_older_state_in_another_cluster_is_found_out_by_its_dialogs(
    two: Two, own_server: EmbeddedServer
) -> None:
    forgotten = two.begin("1")
    remembered = two.begin("1")
    two.talk()
    backup = dump(two.shop.dsn)
    two.shop.says(forgotten, "2")
    two.talk()
    two.shop.dsn = load(own_server, backup)
    two.repair(two.shop)
    two.shop.says(remembered, "2")
    two.talk()
    assert two.check([forgotten.conversation_id, remembered.conversation_id]) == {
        forgotten.conversation_id: False,
        remembered.conversation_id: True,
    }


@pytest.mark.full
@pytest.mark.slow
def test_an_older_copy_of_the_cluster_is_found_out_by_its_dialogs(
    mom: Dsn, migrated: Prepared, own_server: EmbeddedServer
) -> None:
    app = own_server.create_database("app")
    migrate(app)
    two = Two.at(app, mom, migrated.databases)
    forgotten = two.begin("1")
    remembered = two.begin("1")
    two.talk()
    own_server.stop()
    older = own_server.data_dir.with_name("older")
    # with the owners of its files
    subprocess.run(["cp", "-a", own_server.data_dir, older], check=True)
    own_server.start()
    two.shop.says(forgotten, "2")
    two.talk()
    own_server.stop()
    shutil.rmtree(own_server.data_dir)
    older.rename(own_server.data_dir)
    own_server.start()
    # before anybody has noticed
    two.shop.says(forgotten, "another 2", "3")
    two.repair(two.shop)
    two.shop.says(remembered, "2")
    two.talk()
    assert two.check([forgotten.conversation_id, remembered.conversation_id]) == {
        forgotten.conversation_id: False,
        remembered.conversation_id: True,
    }
