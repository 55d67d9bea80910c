"""Held messages and names: who acts first, for how long, by whose leave, and when it is due."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

HELD, OUTBOX = "migrations/baseline/held.sql", "saf/outbox.py"
BROKER, ROSTER = "saf/forwarding/broker.py", "saf/forwarding/roster.py"
TESTS, RACES = "contract/test_held.py", "contract/test_held_races.py"
FORWARDED, SENDERS = "contract/test_held_forwarded.py", "integration/test_senders.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a held message that was sent can be cancelled",
        HELD,
        "h.name = cancel.name AND h.due IS NOT NULL FOR UPDATE",
        "h.name = cancel.name FOR UPDATE",
        f"{TESTS}::test_cancel_takes_a_held_message_back_and_frees_its_name",
    ),
    mutant(
        "who cancels a held message does not wait for its mover",
        HELD,
        "h.name = cancel.name AND h.due IS NOT NULL FOR UPDATE",
        "h.name = cancel.name AND h.due IS NOT NULL FOR UPDATE SKIP LOCKED",
        f"{RACES}::test_what_is_being_moved_is_sent_or_changed_but_never_both",
    ),
    mutant(
        "a mover waits for held messages that are locked",
        HELD,
        "FOR NO KEY UPDATE SKIP LOCKED",
        "FOR NO KEY UPDATE",
        f"{RACES}::test_what_is_being_changed_does_not_move_and_nobody_waits",
    ),
    mutant(
        "several move held messages at a time",
        HELD,
        "IF NOT pg_try_advisory_xact_lock(hashtextextended('saf move held', 0)) THEN",
        "IF false THEN",
        f"{RACES}::test_one_moves_at_a_time_so_that_nothing_is_overtaken",
    ),
    mutant(
        "held messages move in any order",
        HELD,
        "ANY ($1) ORDER BY h.due, h.held_id;",
        "ANY ($1);",
        f"{TESTS}::test_messages_move_in_the_order_of_their_times_and_then_of_their_holding",
    ),
    mutant(
        "the window of a held name begins when it is held",
        HELD,
        "forget_at = clock_timestamp() + h.once_for",
        "forget_at = h.created_at + h.once_for",
        f"{TESTS}::test_the_window_begins_with_the_sending_and_is_as_long_as_asked",
    ),
    mutant(
        "rules are not asked again when a held message is due",
        HELD,
        "one_by_one = (SELECT b.senders_since FROM saf.broker b) IS NOT NULL;",
        "one_by_one = false;",
        f"{SENDERS}::test_rules_that_have_come_since_hold_when_the_message_is_due",
    ),
    mutant(
        "rules do not protect a held message from being replaced",
        HELD,
        "    END LOOP;\n    PERFORM saf.vouch_for(there);\n",
        "    END LOOP;\n",
        f"{SENDERS}::test_rules_hold_for_what_is_held_cancelled_replaced_and_moved_to_another_time",
    ),
    mutant(
        "a sender keeps another's messages back by taking their names, for a held message or not",
        HELD,
        "        IF FOUND THEN\n            PERFORM saf.vouch_for(there);\n",
        "        IF FOUND THEN\n",
        f"{SENDERS}::test_a_name_that_another_sender_has_taken_is_an_error_and_not_a_silence",
    ),
    mutant(
        "a held message has the login as its sender, whatever role is set",
        HELD,
        "coalesce(nullif(current_setting('role'), 'none'), session_user)",
        "session_user::text",
        f"{SENDERS}::test_the_role_that_is_set_counts_as_it_does_for_an_insert",
    ),
    mutant(
        "who skips a held message keeps it from moving",
        HELD,
        "        FOR KEY SHARE;",
        "        FOR SHARE;",
        f"{RACES}::test_who_finds_a_message_there_does_not_keep_it_from_moving",
    ),
    mutant(
        "the limit of a held message counts from the last send",
        HELD,
        "there.created_at + hold.later_limit",
        "moment + hold.later_limit",
        f"{TESTS}::test_later_postpones_at_most_to_the_limit_counted_from_the_first_send",
    ),
    mutant(
        "a held message is moved to a time at which it has expired",
        HELD,
        "fault = saf.never_read('deliver_at', reschedule.deliver_at, there.expires_at);",
        "fault = NULL;",
        f"{TESTS}::test_a_held_message_does_not_move_to_a_time_at_which_it_has_expired",
    ),
    mutant(
        "a message that is not sent, because one was before, seems to be held",
        HELD,
        "outcome = CASE WHEN there.due IS NULL THEN 'already_sent' ELSE 'kept' END;",
        "outcome = 'kept';",
        f"{TESTS}::test_the_outcome_says_whether_a_message_is_in",
    ),
    mutant(
        "later brings a held message forward",
        HELD,
        "greatest(there.due, least(",
        "greatest('-infinity', least(",
        f"{TESTS}::test_later_postpones_with_the_newest_body_but_never_brings_forward",
    ),
    mutant(
        "senders can keep a held message locked for ever",
        HELD,
        "array_append(due_ids, saf.lock_overdue(moment, due_ids))",
        "array_append(due_ids, NULL)",
        f"{RACES}::test_a_message_that_senders_keep_locked_is_waited_for_once_it_is_overdue",
    ),
    mutant(
        "a held message that the outbox rejects stops the others",
        HELD,
        "EXCEPTION WHEN integrity_constraint_violation OR data_exception OR raise_exception THEN",
        "EXCEPTION WHEN data_exception THEN",
        f"{TESTS}::test_a_message_that_the_outbox_rejects_stays_with_the_reason_and_stops_no_other",
    ),
    mutant(
        "a signed message that was held has a time that it was not signed with",
        HELD,
        "CASE WHEN h.name IS NULL OR NOT coalesce(h.headers, '{}') ? 'saf-signature'\n"
        "                THEN h.due END",
        "h.due",
        f"{FORWARDED}::test_a_signed_message_that_was_held_and_moved_to_other_times_verifies",
    ),
    mutant(
        "many names are held in the order in which they are given",
        OUTBOX,
        'ORDER BY to_service COLLATE "C", name COLLATE "C", place',
        "ORDER BY place",
        f"{RACES}::test_two_who_send_many_names_in_different_orders_do_not_wait_in_a_circle",
    ),
    mutant(
        "a quiet source is not searched when a held message is due",
        BROKER,
        "return not (self._is_due(due_in) and self.move_held()) and quiet",
        "return quiet",
        f"{FORWARDED}::test_a_quiet_source_is_asked_for_what_becomes_due_by_time_alone",
    ),
    mutant(
        "a loop sleeps past the time of a held message",
        ROSTER,
        "return at if broker.due_in is None else min(at, now + broker.due_in)",
        "return at",
        f"{FORWARDED}::test_a_loop_forwards_what_becomes_due_by_time_alone",
    ),
    mutant(
        "a run ends while held messages are due",
        "saf/forwarding/forwarder.py",
        " or b.held_left",
        "",
        f"{FORWARDED}::test_a_run_takes_as_many_visits_as_all_that_is_due_needs",
    ),
    mutant(
        "a copied broker sends what its original holds",
        "saf/operating/repair/new_id.py",
        'for table in ("outbox", "parked", "dead_letter", "held")',
        'for table in ("outbox", "parked", "dead_letter")',
        "integration/test_copied_brokers.py::"
        "test_a_copy_is_refused_by_name_and_is_a_broker_of_its_own_after_new_id",
    ),
]
