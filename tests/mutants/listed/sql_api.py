"""Dialogs and receiving from SQL: what is written, refused, counted, and left to the library."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

DIALOGS, RECEIVE = "migrations/baseline/sql_dialogs.sql", "migrations/baseline/sql_receive.sql"
GRANTS = "saf/broker/grants.py"
SPEAKS, TESTS = "contract/test_sql_api.py", "contract/test_sql_receive.py"
TAKING = "migrations/baseline/sql_taking.sql"
CHOSEN = "contract/test_sql_chosen.py"
KILLS, PAGE = "contract/test_sql_kills.py", "integration/test_sql_api_page.py"
SAME = f"{SPEAKS}::test_both_write_the_same_rows"
REFUSED = f"{SPEAKS}::test_both_refuse_the_same_and_write_nothing"

MUTANTS: list[Mutant] = [
    mutant(
        "SQL introduces the target only to a contract",
        DIALOGS,
        "'contract', e.contract, 'version', e.contract_version,\n",
        "\n",
        SAME,
    ),
    mutant(
        "SQL begins a dialog without the end of its lifetime",
        DIALOGS,
        "    PERFORM saf.expire_later(e);\n    RETURN e.handle;",
        "    RETURN e.handle;",
        f"{SPEAKS}::test_the_end_of_the_lifetime_reaches_this_end_too",
    ),
    mutant(
        "SQL says what the contract does not allow",
        DIALOGS,
        "PERFORM saf.refuse_dialog('contract_allows', checked.fault);",
        "NULL;",
        REFUSED,
    ),
    mutant(
        "SQL skips a schema in silence",
        DIALOGS,
        "        unchecked = true;\n        fault =",
        "        unchecked = true; --",
        f"{SPEAKS}::test_sql_refuses_a_type_with_a_schema_by_its_name",
    ),
    mutant(
        "SQL sends a body of any size in one piece",
        DIALOGS,
        "THEN 67108864 ELSE 1048576 END)",
        "THEN 67108864 ELSE 67108864 END)",
        f"{SPEAKS}::test_sql_sends_a_body_up_to_the_size_of_a_fragment_and_refuses_a_larger_one",
    ),
    mutant(
        "SQL takes saf's own headers from an application",
        DIALOGS,
        "starts_with(lower(k.name), 'saf-')",
        "starts_with(k.name, 'saf-')",
        REFUSED,
    ),
    mutant(
        "an End of an end that was never heard of is sent",
        DIALOGS,
        "CASE WHEN c.send_sequence > 0 OR NOT c.is_initiator THEN 1 ELSE 0 END",
        "1",
        SAME,
    ),
    mutant(
        "two receivers of SQL wait for one shard",
        TAKING,
        "(fresh AND handed = 0 OR f.allowance IS NULL)\n            FOR UPDATE SKIP LOCKED",
        "(fresh AND handed = 0 OR f.allowance IS NULL)",
        f"{TESTS}::test_two_receivers_never_have_one_key_in_hand",
        KILLS,
    ),
    mutant(
        "SQL counts its own transaction as complete",
        TAKING,
        "            c.open = saf.without_own(pg_current_snapshot(), pg_current_xact_id());",
        "            c.open = pg_current_snapshot();",
        f"{TESTS}::test_what_it_stores_is_not_lost_if_a_later_transaction_has_ended",
    ),
    mutant(
        "SQL reads on by id alone",
        TAKING,
        "n.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done)))) AS i\n"
        "    WHERE i.txid < pg_snapshot_xmax(c.open)",
        "false) AS i\n    WHERE i.txid < pg_snapshot_xmax(c.open)",
        f"{TESTS}::test_a_late_committer_is_not_lost",
    ),
    mutant(
        "SQL sees no trace of a failed delivery",
        RECEIVE,
        "SELECT $1 <> '0'::xid AND pg_xact_status((",
        "SELECT false AND $1 <> '0'::xid AND pg_xact_status((",
        f"{TESTS}::test_each_attempt_of_a_killed_receiver_is_counted_in_the_end",
        f"{TESTS}::test_a_message_that_always_fails_becomes_a_dead_letter_and_the_others_go_on",
    ),
    mutant(
        "a failure counts against keys that only wait",
        TAKING,
        "             WHERE o.subscription_id = r.subscription_id AND o.shard = c.shard\n"
        "               AND saf.is_failed(o.xmax) LOOP",
        "             WHERE o.subscription_id = r.subscription_id LOOP",
        f"{TESTS}::test_a_failure_is_not_counted_against_keys_that_only_wait",
    ),
    mutant(
        "a message is not alone in its second delivery",
        TAKING,
        "OR (hand ->> 'alone')::boolean OR NOT saf.has_seat(r) THEN",
        "OR NOT saf.has_seat(r) THEN",
        f"{TESTS}::test_a_count_that_is_lost_with_its_transaction_is_made_by_the_next",
    ),
    mutant(
        "SQL receives from a paused subscription",
        TAKING,
        "IF r.paused_at IS NOT NULL OR (hand",
        "IF (hand",
        f"{TESTS}::test_a_paused_subscription_gives_nothing_until_it_is_resumed",
    ),
    mutant(
        "SQL receives past the limits of a subscription",
        TAKING,
        "IF num_nonnulls(r.rate, r.fair_by, r.priority_by) > 0 THEN",
        "IF num_nonnulls(r.fair_by) > 0 THEN",
        f"{TESTS}::test_a_subscription_with_rules_that_sql_does_not_follow_is_refused",
    ),
    mutant(
        "messages overtake one of their key that waits",
        RECEIVE,
        "    ELSIF NOT of_lane AND EXISTS (",
        "    ELSIF false AND EXISTS (",
        f"{TESTS}::test_what_arrives_for_a_key_that_waits_waits_behind_it",
    ),
    mutant(
        "messages in hand do not wait behind one that is tried later",
        RECEIVE,
        "AND (e.value ->> 'id')::bigint > (o.m).id",
        "AND false",
        f"{TESTS}::test_messages_in_hand_behind_one_that_is_tried_later_wait_too",
    ),
    mutant(
        "a message of a lane has no copy to be set aside",
        RECEIVE,
        "    OPEN kept NO SCROLL FOR SELECT p.* FROM saf.parked p WHERE p.parked_id = $1;\n"
        "    DELETE FROM saf.parked p WHERE p.parked_id = $1;",
        "    DELETE FROM saf.parked p WHERE p.parked_id = $1;\n"
        "    OPEN kept NO SCROLL FOR SELECT p.* FROM saf.parked p WHERE p.parked_id = $1;",
        f"{TESTS}::test_a_message_from_a_lane_is_set_aside_again_with_its_body",
    ),
    mutant(
        "a dialog's message that is tried later counts as received",
        RECEIVE,
        "PERFORM saf.take_back(o.h);",
        "NULL;",
        f"{TESTS}::test_a_message_of_a_dialog_tried_later_is_not_received_yet",
    ),
    mutant(
        "SQL takes a message of a dialog ahead of its turn",
        RECEIVE,
        "    ELSIF m.sequence > e.receive_sequence + 1 THEN\n        verdict = 'wait';",
        "    ELSIF false THEN\n        verdict = 'wait';",
        f"{TESTS}::test_a_repeat_is_dropped_and_what_is_ahead_waits",
    ),
    mutant(
        "a rejected message of a dialog fails nobody",
        RECEIVE,
        "PERFORM saf.fail_dialog(of_end, -2,",
        "PERFORM format('%s', ",
        f"{TESTS}::test_a_rejected_message_of_a_dialog_fails_both_ends",
    ),
    mutant(
        "SQL hands out a part of a large body",
        RECEIVE,
        "ARRAY['saf-fragment', 'saf-whole']",
        "ARRAY['saf-fragments', 'saf-wholes']",
        f"{TESTS}::test_parts_of_a_large_body_wait_for_the_library_which_then_receives_it",
    ),
    mutant(
        "two receivers of SQL have one group in hand",
        RECEIVE,
        "            verdict = 'busy';\n            RETURN;",
        "",
        f"{TESTS}::test_a_group_that_another_receiver_has_in_hand_is_left_alone",
    ),
    mutant(
        "everybody receives",
        TAKING,
        "REVOKE ALL ON FUNCTION saf.receive FROM PUBLIC;",
        "",
        f"{PAGE}::test_the_roles_may_do_what_the_page_says_and_nothing_else",
        "integration/test_grants.py::test_each_function_is_listed_and_whoever_executes_it_has_only_the_rights_meant",
    ),
    mutant(
        "SQL closes a batch and looks no further",
        TAKING,
        "        EXIT WHEN up_to_now OR NOT complete;",
        "        EXIT WHEN true;",
        f"{TESTS}::test_a_loop_that_stops_at_the_first_empty_result_has_everything",
    ),
    mutant(
        "messages that are not handed out end a call of SQL",
        TAKING,
        "AND (handed = 0 OR read < 1000) LOOP",
        "AND read < 1000 LOOP",
        f"{TESTS}::test_what_is_not_handed_out_does_not_end_the_loop",
    ),
    mutant(
        "an expired delayed message hides the next one from SQL",
        TAKING,
        "        EXIT WHEN found = 0 OR handed >= wanted;",
        "        EXIT WHEN true;",
        f"{TESTS}::test_what_is_not_handed_out_does_not_end_the_loop",
    ),
    mutant(
        "an expired message of a lane hides the next one from SQL",
        TAKING,
        "EXIT WHEN handed > 0 OR verdict IS DISTINCT FROM 'done';",
        "EXIT WHEN true;",
        f"{TESTS}::test_a_lane_whose_first_messages_expired_does_not_end_the_loop",
    ),
    mutant(
        "due lanes of a locked shard hide all others from SQL",
        TAKING,
        "EXIT WHEN looked < 100 OR cardinality(busy) = newly;",
        "EXIT WHEN true;",
        f"{TESTS}::test_many_due_lanes_of_a_shard_in_use_do_not_hide_one_of_another",
    ),
    mutant(
        "SQL takes no seat of a concurrency",
        TAKING,
        "    IF r.concurrency IS NULL\n",
        "    IF true\n",
        f"{TESTS}::test_a_concurrency_holds_for_python_and_sql_together",
    ),
    mutant(
        "a snapshot of SQL lists transactions as text",
        TAKING,
        "string_agg(x::text, ',' ORDER BY x)",
        "string_agg(x::text, ',' ORDER BY x::text)",
        f"{CHOSEN}::test_a_snapshot_lists_transactions_by_number",
    ),
    mutant(
        "SQL receives other dialogs with a chosen one",
        TAKING,
        "      AND (read_on.conversation IS NULL OR i.conversation_id = read_on.conversation)\n",
        "",
        f"{CHOSEN}::test_a_conversation_is_received_whatever_waits_before_it",
    ),
    mutant(
        "SQL receives a chosen message again",
        TAKING,
        "            ids = ids + int8multirange(int8range(m.id, m.id, '[]'));\n",
        "",
        f"{CHOSEN}::test_a_conversation_is_received_whatever_waits_before_it",
    ),
    mutant(
        "SQL finds no chosen message after the open batch",
        TAKING,
        "    IF NOT in_batch THEN",
        "    IF false THEN",
        f"{CHOSEN}::test_what_arrives_after_a_batch_was_opened_is_received_too",
    ),
    mutant(
        "an extended batch of SQL forgets what is complete beyond its position",
        TAKING,
        "WHERE u.complete AND u.id > first_id GROUP BY u.part",
        "WHERE false GROUP BY u.part",
        f"{CHOSEN}::test_what_arrives_after_a_batch_was_opened_is_received_too",
    ),
    mutant(
        "an extended batch of SQL forgets running transactions",
        TAKING,
        "WHERE x.txid < first_txid;",
        "WHERE false;",
        f"{CHOSEN}::test_a_late_committer_is_neither_lost_nor_repeated",
    ),
    mutant(
        "SQL extends the batch of a shard of any size",
        TAKING,
        "    IF messages > 16384 THEN",
        "    IF false THEN",
        f"{CHOSEN}::test_a_shard_with_too_many_messages_is_not_extended",
    ),
    mutant(
        "SQL receives the dialogs of another service",
        TAKING,
        "IS NOT FALSE OR r.name <> r.service THEN",
        "IS NOT FALSE AND false THEN",
        f"{CHOSEN}::test_both_refuse_the_same_with_the_same_words",
    ),
    mutant(
        "a subscription that listens in receives dialogs by their handles",
        TAKING,
        " OR r.name <> r.service THEN",
        " THEN",
        f"{CHOSEN}::test_a_subscription_that_listens_in_is_refused",
    ),
    mutant(
        "a failed chosen message counts against the first of its shard",
        TAKING,
        "IF NOT of_lane AND NOT ahead AND c.allowance = 1 THEN",
        "IF NOT of_lane AND c.allowance = 1 THEN",
        f"{CHOSEN}::test_a_count_that_is_rolled_back_is_not_made_against_another_message",
    ),
    mutant(
        "a chosen message is tried before its attempt is counted",
        TAKING,
        "PERFORM set_config('saf.in_hand',\n                                   jsonb_set(",
        "PERFORM format('saf.in_hand',\n                                   jsonb_set(",
        f"{CHOSEN}::test_a_count_that_is_rolled_back_is_not_made_against_another_message",
    ),
    mutant(
        "a look of SQL for a dialog writes",
        TAKING,
        "pg_current_xact_id_if_assigned());",
        "pg_current_xact_id());",
        f"{CHOSEN}::test_a_look_that_finds_nothing_writes_nothing",
    ),
]
