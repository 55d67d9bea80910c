"""Logs as tables of Spark."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

PART, QUERY = "saf/spark/table/part.py", "saf/spark/table/query.py"
OPTIONS = "saf/spark/table/options.py"
MOMENT = "spark/test_table_snapshot.py"

ARCHIVED = "saf/spark/table/archived.py"
OF_ARCHIVES = "spark/test_table_archive.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a purge of what was committed fails the tasks of the next micro-batch",
        "saf/spark/table/part.py",
        "if purged and not _keeps(cursor, part.batch):",
        "if purged:",
        "contract/test_streams.py::test_a_purge_of_what_was_committed_before_fails_no_task",
    ),
    mutant(
        "a task reads on although its subscription is gone",
        "saf/spark/table/part.py",
        "    return {shard for shard, _ in committed} == {*batch.shards} and all(",
        "    return all(",
        "contract/test_streams.py::"
        "test_rows_that_a_purge_takes_after_a_drop_are_missed_by_the_task",
    ),
    mutant(
        "a slot that cannot be archived holds up the others",
        "saf/log/ring.py",
        "                not_archived = not_archived or error\n",
        "                raise\n",
        "contract/test_archives.py::test_a_slot_that_cannot_be_archived_holds_up_no_other_one",
    ),
    mutant(
        "an epoch that comes again is refused for what has expired",
        "saf/spark/table/outgoing.py",
        'if may_be_late and "expires_at"',
        'if not may_be_late and "expires_at"',
        "contract/test_sinks.py::test_a_stream_may_send_what_has_expired_since_it_was_read",
    ),
    mutant(
        "a stream without one of its cursors is waited for",
        "saf/log/stream.py",
        "    if number != shards:\n",
        "    if number > shards:\n",
        "contract/test_streams.py::test_a_subscription_that_lacks_a_cursor_is_refused",
    ),
    mutant(
        "a new checkpoint without a limit forgets where its subscription begins",
        "saf/spark/table/stream.py",
        " and not known.begins_at(start)",
        "",
        "contract/test_streams.py::"
        "test_a_new_checkpoint_begins_where_the_subscription_is_also_if_it_is_asked_again",
    ),
    mutant(
        "a checkpoint that lacks its last micro-batch gets another one",
        "saf/log/stream.py",
        "        if self.batch <= start.batch:\n",
        "        if True:\n",
        "contract/test_streams.py::"
        "test_a_checkpoint_that_lacks_its_last_micro_batch_gets_that_again_as_it_was",
    ),
    mutant(
        "what is archived and in the log still is read twice out of a folder",
        ARCHIVED,
        "if not log.has(item.slot, _first(item.path))]",
        "if item]",
        f"{OF_ARCHIVES}::test_what_is_archived_and_has_not_left_the_log_is_read_once",
    ),
    mutant(
        "what is archived and in the log still is read twice out of a table",
        ARCHIVED,
        "    for slot, number in part.in_log:\n",
        "    for slot, number in part.in_log[1:]:\n",
        f"{OF_ARCHIVES}::test_what_is_archived_and_has_not_left_the_log_is_read_once",
    ),
    mutant(
        "only the last archive of a slot is looked for in the log",
        "saf/destinations/delta/archive.py",
        "    for number in range(last, 0, -1):\n",
        "    for number in range(last, last - 1, -1):\n",
        f"{OF_ARCHIVES}::test_what_is_archived_and_has_not_left_the_log_is_read_once",
    ),
    mutant(
        "an archive is read that may have what a log has again",
        ARCHIVED,
        "    if found.files and found.incarnation != log.incarnation:\n",
        "    if found.files and found.incarnation < 0:\n",
        f"{OF_ARCHIVES}::test_a_broker_that_was_set_back_has_another_archive",
    ),
    mutant(
        "purges go on while the archive is looked at",
        PART,
        "        if meanwhile is not None:\n            meanwhile(connection)\n"
        "        connection.rollback()\n",
        "        connection.rollback()\n        if meanwhile is not None:\n"
        "            meanwhile(connection)\n        connection.rollback()\n",
        f"{OF_ARCHIVES}::test_a_purge_waits_while_a_read_is_planned",
    ),
    mutant(
        "filters of an archive let rows without a value pass",
        ARCHIVED,
        'return column.is_null() if condition.operator == "null" else column.is_valid()',
        "return column.is_valid()",
        f"{OF_ARCHIVES}::test_filters_let_the_same_messages_of_an_archive_pass",
    ),
    mutant(
        "a table with purged messages has fewer rows",
        PART,
        "if purged and not _keeps(cursor, part.batch):",
        "if len(purged) > 8:",
        f"{MOMENT}::test_a_read_that_a_purge_has_taken_rows_from_fails_and_says_what_to_do",
    ),
    mutant(
        "a task lets the rows that it reads be purged",
        PART,
        "        cursor.execute(sql.SQL(LOCK).format(log=sql.Identifier(log)).as_string(None))\n",
        "",
        f"{MOMENT}::test_a_partition_in_hand_keeps_its_rows_from_being_purged",
    ),
    mutant(
        "a partition in windows forgets its filters",
        PART,
        "given(cursor, query.of(window.rows(batch, columns)))",
        "given(cursor, Query(asked=query.asked).of(window.rows(batch, columns)))",
        "spark/test_table.py"
        "::test_a_deep_log_is_read_in_windows_with_the_same_rows_in_the_same_order",
    ),
    mutant(
        "rows with columns that most do not have are left out",
        PART,
        "                if len(whole) == len(rows):\n",
        "                if True:\n",
        "spark/test_table.py"
        "::test_a_deep_log_is_read_in_windows_with_the_same_rows_in_the_same_order",
    ),
    mutant(
        "texts are compared as the database sorts them",
        QUERY,
        "\"convert_to({column}, 'UTF8') {operator} convert_to({value}::text, 'UTF8')\"",
        '"{column} COLLATE \\"und-x-icu\\" {operator} {value}::text"',
        "spark/test_table_filters.py"
        "::test_a_read_with_filters_gives_what_spark_would_keep_of_a_read_without",
    ),
    mutant(
        "what the database cannot hold is asked of it",
        QUERY,
        'isinstance(value, str) and "\\0" not in value and _is_utf8(value)',
        "isinstance(value, str)",
        "spark/test_table_filters.py::test_spark_keeps_what_it_cannot_or_no_row_could_match",
    ),
    mutant(
        "one body that is no text takes the other bodies' texts away",
        QUERY,
        "[_decoded(body) for body in bodies.to_pylist()]",
        "[None for body in bodies.to_pylist()]",
        "spark/test_table.py::test_a_schema_chooses_the_columns_and_their_order",
    ),
    mutant(
        "who makes a table of the format is told of an option that he has not given",
        "saf/spark/table/options.py",
        'name.startswith("option.") or name == "provider"',
        'name.startswith("option.") and name == "provider"',
        "spark/test_table_errors.py::test_an_option_that_is_wrong_is_named",
    ),
    mutant(
        "a restored broker is a table",
        PART,
        "    health.refuse(connection, log)\n",
        "",
        "spark/test_table_errors.py::test_a_restored_broker_is_refused",
    ),
    mutant(
        "a standby is read",
        "saf/database/dsn.py",
        'parts["target_session_attrs"] = "primary"',
        'parts["target_session_attrs"] = "any"',
        "contract/test_standby.py::test_of_several_hosts_only_a_primary_is_read_and_written",
    ),
    mutant(
        "an option that is no dsn's place may be one",
        OPTIONS,
        "        if name not in NAMES:\n",
        '        if name not in (*NAMES, "dsn"):\n',
        "spark/test_table_errors.py::test_a_dsn_in_an_option_is_refused_and_not_repeated",
    ),
]
