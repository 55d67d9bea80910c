"""A dialog whose one end was set back goes on without a gap or a repeat, or fails at both ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from saf.database import Dsn
from saf.dialogs.statements import Code
from tests.conftest import Prepared
from tests.set_backs import Two


@pytest.fixture
def two(app: Dsn, mom: Dsn, migrated: Prepared) -> Iterator[Two]:
    made = Two.at(app, mom, migrated.databases)
    yield made
    for place in (made.shop, made.warehouse):
        for copy in place.copies:
            migrated.databases.drop(copy)


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
