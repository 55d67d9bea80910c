"""Captures and backfills: each change once, in order, with nobody else's rights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

CODE, STORED, DRIFT = "saf/capture/code.py", "saf/capture/stored.py", "saf/capture/drift.py"
BACKFILL, TABLE = "saf/capture/backfill.py", "saf/capture/table.py"
CAPTURES, BACKFILLS = "contract/test_capture.py", "contract/test_backfill.py"
COMMAND = "integration/test_capture_command.py"

MUTANTS: list[Mutant] = [
    mutant(
        "an insert under a new key comes before the delete under the old one",
        CODE,
        "        ORDER BY saf_op;\n",
        "        ORDER BY saf_op DESC;\n",
        f"{CAPTURES}::test_a_changed_key_is_a_delete_and_an_insert_and_deletes_come_first",
    ),
    mutant(
        "rows are matched by the first column of their primary key",
        CODE,
        '_each("old.{0} = new.{0}", shape.primary_key, " AND ")',
        '_each("old.{0} = new.{0}", shape.primary_key[:1], " AND ")',
        f"{CAPTURES}::test_changes_of_partitions_are_sent_whatever_table_the_statement_names",
    ),
    mutant(
        "an update that changes nothing is sent",
        CODE,
        "ELSE saf_op = 'update' AND {changed} END",
        "ELSE saf_op = 'update' END",
        f"{CAPTURES}::test_an_update_that_changes_nothing_it_sends_is_not_sent",
    ),
    mutant(
        "an update of a column that only the condition reads is not sent",
        STORED,
        "(*shape.columns, shape.key, *read)",
        "(*shape.columns, shape.key)",
        f"{CAPTURES}::test_the_condition_chooses_rows_and_a_column_that_it_reads_counts_as_changed",
    ),
    mutant(
        "values are written as the session has it",
        CODE,
        '    "TimeZone": "UTC",\n',
        "",
        f"{CAPTURES}::test_values_are_written_the_same_whatever_the_session_has_set",
    ),
    mutant(
        "bodies are jsonb, which rejects values that json accepts",
        CODE,
        "row_to_json((SELECT r FROM (SELECT {}) AS r))::text",
        "to_jsonb((SELECT r FROM (SELECT {}) AS r))::text",
        f"{CAPTURES}::test_values_are_written_the_same_whatever_the_session_has_set",
    ),
    mutant(
        "the function runs with the rights of whoever writes to the table",
        CODE,
        "LANGUAGE plpgsql SECURITY DEFINER\n",
        "LANGUAGE plpgsql\n",
        f"{CAPTURES}::test_writers_need_no_right_in_schema_saf_and_get_none",
    ),
    mutant(
        "anybody may use the function in a trigger",
        STORED,
        'REVOKE = "REVOKE ALL ON FUNCTION saf.{function}() FROM PUBLIC"',
        'REVOKE = "GRANT ALL ON FUNCTION saf.{function}() TO PUBLIC"',
        f"{CAPTURES}::test_writers_need_no_right_in_schema_saf_and_get_none",
    ),
    mutant(
        "a writer's operators are found before the server's",
        CODE,
        '    "search_path": "pg_catalog, pg_temp",\n',
        '    "search_path": "public, pg_catalog",\n',
        f"{CAPTURES}::test_writers_need_no_right_in_schema_saf_and_get_none",
    ),
    mutant(
        "the condition may call what others can change",
        STORED,
        "    for called, owner in fetch(connection, CALLS):\n",
        "    for called, owner in fetch(connection, CALLS)[:0]:\n",
        f"{CAPTURES}::test_a_condition_may_not_call_what_another_role_can_change",
    ),
    mutant(
        "a condition may be several statements",
        STORED,
        "connection.execute(view, binary=True)",
        "connection.execute(view)",
        f"{CAPTURES}::test_a_declaration_that_would_fail_at_the_first_change_is_refused",
    ),
    mutant(
        "a truncate is not noticed",
        CODE,
        'EVENTS = ("insert", "update", "delete", "truncate")',
        'EVENTS = ("insert", "update", "delete")',
        f"{CAPTURES}::test_a_truncate_is_refused_and_says_what_to_do",
    ),
    mutant(
        "partitions get no triggers of their own",
        STORED,
        "    for relation in table.relations:\n",
        "    for relation in table.relations[:1]:\n",
        f"{CAPTURES}::test_changes_of_partitions_are_sent_whatever_table_the_statement_names",
    ),
    mutant(
        "a capture waits for a lock for ever, and all writers behind it",
        STORED,
        "milliseconds = str(round(LOCK_SECONDS * 1000))",
        "milliseconds = str(round(LOCK_SECONDS * 200_000))",
        f"{CAPTURES}::test_a_table_that_is_locked_is_not_waited_for",
    ),
    mutant(
        "a disabled trigger counts as one",
        DRIFT,
        'FIRES = ("O", "A")',
        'FIRES = ("O", "A", "D")',
        f"{CAPTURES}::test_what_differs_from_what_was_written_is_noticed",
    ),
    mutant(
        "a function that was replaced is not noticed",
        DRIFT,
        "    if now != digest:\n",
        "    if not now:\n",
        f"{CAPTURES}::test_what_differs_from_what_was_written_is_noticed",
    ),
    mutant(
        "the doctor does not look at captures",
        "saf/operating/doctor/__init__.py",
        "    captures.captures,\n",
        "",
        f"{COMMAND}::test_the_doctor_finds_a_capture_that_drifted_and_its_cure_is_a_command",
    ),
    mutant(
        "a backfill overtakes a change that is not committed yet",
        CODE,
        "WHERE {where} FOR SHARE OF t SKIP LOCKED",
        "WHERE {where}",
        f"{BACKFILLS}::test_a_row_that_a_session_is_changing_is_left_over_and_sent_as_it_is_then",
    ),
    mutant(
        "a backfill waits for locks with its own in hand",
        CODE,
        "WHERE {where} FOR SHARE OF t SKIP LOCKED",
        "WHERE {where} FOR SHARE OF t",
        f"{BACKFILLS}::test_a_row_that_a_session_is_changing_is_left_over_and_sent_as_it_is_then",
    ),
    mutant(
        "a locked row is never sent",
        CODE,
        "WHERE NOT EXISTS (SELECT FROM locked AS t WHERE {is_found}))",
        "WHERE false AND NOT EXISTS (SELECT FROM locked AS t WHERE {is_found}))",
        f"{BACKFILLS}::test_a_row_that_a_session_is_changing_is_left_over_and_sent_as_it_is_then",
    ),
    mutant(
        "a backfill that continues begins again",
        BACKFILL,
        "            last_key=last_key,\n",
        "",
        f"{BACKFILLS}::test_a_second_run_continues_where_the_first_was_stopped",
    ),
    mutant(
        "a backfill ignores the condition of its capture",
        CODE,
        "    FROM locked AS new LEFT JOIN locked AS old ON false\n    WHERE {condition}\n",
        "    FROM locked AS new LEFT JOIN locked AS old ON false\n    WHERE true OR {condition}\n",
        f"{BACKFILLS}::test_only_the_rows_of_where_and_of_the_captures_condition_are_sent",
    ),
    mutant(
        "two backfills of a table run at the same time",
        BACKFILL,
        "    if not taken:\n",
        "    if taken is None:\n",
        f"{BACKFILLS}::test_a_second_run_at_the_same_time_is_refused_with_who_has_it",
    ),
    mutant(
        "a running backfill does not hear of a pause",
        BACKFILL,
        "        if ended or paused:\n",
        "        if ended:\n",
        f"{BACKFILLS}::test_a_pause_ends_the_run_and_a_resumed_one_continues",
    ),
    mutant(
        "policies hide rows from a backfill",
        STORED,
        "    connection.execute(ALL_ROWS)\n",
        "",
        f"{BACKFILLS}::test_policies_hide_no_rows_from_a_backfill",
    ),
    mutant(
        "a plan does not repair a capture that differs",
        "saf/operating/plans/captures.py",
        "if any(found.misses for found in drift(connection, item))",
        "if not item",
        f"{COMMAND}::test_a_plan_has_captures_repairs_them_and_is_exported",
    ),
    mutant(
        "what is written is not what was shown",
        "saf/cli/capture.py",
        "        if review.statements != shown.statements:\n",
        "        if review is None:\n",
        f"{COMMAND}::test_a_table_that_changes_between_the_review_and_its_answer_is_not_captured",
    ),
]
