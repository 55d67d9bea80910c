"""Awaited: dialogs inside one database, and what waits for one conversation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

STORED, LOCAL = "migrations/baseline/local_dialogs.sql", "saf/routing/local.py"
CHOSEN, RECEIVE, WAITING = (
    "saf/receiving/chosen.py",
    "saf/receiving/receive.py",
    "saf/dialogs/waiting.py",
)
INSIDE, OF_CHOSEN, OF_WAITING = (
    "contract/test_local_dialogs.py",
    "contract/test_chosen.py",
    "contract/test_waiting.py",
)
AFTER_A_BATCH = f"{OF_CHOSEN}::test_what_arrives_after_a_batch_was_opened_is_received_too"

MUTANTS: list[Mutant] = [
    mutant(
        "a dialog's first message that is stored here tells its initiator nothing",
        STORED,
        "SET far_broker = here",
        "SET far_broker = NULL",
        f"{INSIDE}::test_a_dialog_that_began_here_is_not_led_to_another_database",
    ),
    mutant(
        "a dialog's message for another broker is stored here",
        STORED,
        "ELSIF NEW.to_broker <> here THEN",
        "ELSIF false THEN",
        f"{INSIDE}::test_a_dialog_with_the_service_of_another_database_stays_with_it",
    ),
    mutant(
        "a first message that is sent again begins its dialog here",
        STORED,
        "AND c.send_sequence = 1\n",
        "\n",
        f"{INSIDE}::test_a_first_message_that_is_sent_again_does_not_begin_the_dialog_here",
    ),
    mutant(
        "a dialog's message that is stored here has no source",
        STORED,
        "NEW.expires_at, here);",
        "NEW.expires_at, NULL);",
        f"{INSIDE}::test_the_rows_are_those_that_the_forwarder_would_have_stored",
    ),
    mutant(
        "a route becomes local whatever its open dialogs know",
        LOCAL,
        "            _know_targets(connection, service)\n",
        "",
        f"{INSIDE}::test_a_route_does_not_become_local_while_a_dialog_s_target_is_unknown",
    ),
    mutant(
        "a dialog that was answered elsewhere comes here",
        LOCAL,
        "far_broker = coalesce(c.answered_by, b.broker_id)",
        "far_broker = b.broker_id",
        f"{INSIDE}::test_a_dialog_with_the_service_of_another_database_stays_with_it",
    ),
    mutant(
        "a dialog whose first message is not received yet keeps its route from becoming local",
        LOCAL,
        "WHERE m.from_initiator AND m.sequence = 1)",
        "WHERE false)",
        f"{INSIDE}::test_a_dialog_that_began_by_the_forwarder_goes_on_when_the_route_becomes_local",
    ),
    mutant(
        "an upgrade leaves the triggers of local routes as they were",
        STORED,
        "WHERE r.local AND t.tgrelid = 'saf.outbox'::regclass AND t.tgenabled <> 'D'",
        "WHERE false",
        f"{INSIDE}::test_routes_that_are_local_before_the_upgrade_carry_dialogs_after_it",
    ),
    mutant(
        "an extended batch begins at its old position",
        CHOSEN,
        "else first, incomplete[0] - 1, f",
        "else first, shard.position, f",
        "unit/test_doctests.py",
    ),
    mutant(
        "a message that arrives after its batch was opened is not found",
        CHOSEN,
        "    if mine and not mine[0][2]:\n",
        "    if False:\n",
        AFTER_A_BATCH,
    ),
    mutant(
        "a shard of any size is extended",
        CHOSEN,
        "        if len(rows) > MOST:\n",
        "        if False:\n",
        f"{OF_CHOSEN}::test_a_shard_with_too_many_messages_is_not_extended",
    ),
    mutant(
        "a receiver of a conversation gets those of its shard",
        CHOSEN,
        "AND since.conversation_id = %(conversation_id)s AND {_LEFT}",
        "AND {_LEFT}",
        f"{OF_CHOSEN}::test_a_conversation_is_received_whatever_waits_before_it",
    ),
    mutant(
        "a group is all conversations of its service",
        CHOSEN,
        "OR group_id = %(group_id)s)",
        "OR %(group_id)s::uuid IS NOT NULL)",
        f"{OF_CHOSEN}::test_a_group_is_received_and_no_other_dialog",
    ),
    mutant(
        "a conversation's delivery that failed leaves no trace",
        CHOSEN,
        "                    shard.allowance = 1\n",
        "                    shard.allowance = None\n",
        f"{OF_CHOSEN}::test_a_delivery_that_fails_is_repeated_and_then_a_dead_letter",
    ),
    mutant(
        "an attempt at a conversation's message is not counted before it is made",
        RECEIVE,
        "number = 2 if shard.allowance == (None if failed else 1) else 1",
        "number = 1",
        f"{OF_CHOSEN}::test_a_delivery_that_fails_is_repeated_and_then_a_dead_letter",
    ),
    mutant(
        "a wait is not woken",
        RECEIVE,
        "            receiver.listen_if_possible()\n",
        "            pass\n",
        f"{OF_WAITING}::test_a_notification_wakes_a_wait",
    ),
    mutant(
        "a connection that waited goes on listening",
        RECEIVE,
        """        finally:
            receiver.forget()
        fail_point("receive_committed")
""",
        """        finally:
            pass
        fail_point("receive_committed")
""",
        f"{OF_WAITING}::test_a_connection_is_given_back_without_listening",
    ),
    mutant(
        "a wait takes a message of another type",
        WAITING,
        "        if wanted not in (None, message.message_type):\n",
        "        if False:\n",
        f"{OF_WAITING}::test_a_message_of_another_type_stays_the_next_one",
    ),
    mutant(
        "a wait on a dialog that is over waits",
        WAITING,
        "    if state in OPEN:\n",
        "    if True:\n",
        f"{OF_WAITING}::test_an_end_is_raised_at_once_and_by_later_waits",
    ),
    mutant(
        "a large answer cannot be read after the wait",
        "saf/dialogs/assembly.py",
        "        return self.with_body(self.body)\n",
        "        return self\n",
        f"{OF_WAITING}::test_a_large_answer_is_in_memory_when_it_is_received",
    ),
]
