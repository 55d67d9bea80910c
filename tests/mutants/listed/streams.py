"""Streams of logs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

OFFSET, STREAM = (f"saf/log/{name}.py" for name in ("offset", "stream"))
READER = "saf/spark/table/stream.py"
STREAMS = "contract/test_streams.py"
TABLE = "saf/destinations/delta/micro_batches.py"
LAKE = "contract/test_micro_batches.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a query takes over less than all shards",
        STREAM,
        "            if len(rows) == known.shards:\n",
        "            if rows is not None:\n",
        f"{STREAMS}::test_a_query_takes_over_while_the_older_one_opens_a_batch",
    ),
    mutant(
        "what was read of a batch comes again with the next one",
        OFFSET,
        "before=(start.open, start.position) if start.open and not same_batch else None",
        "before=None",
        f"{STREAMS}::test_without_a_limit_spark_gets_all_that_is_there",
    ),
    mutant(
        "what comes before a cut batch is cut too",
        OFFSET,
        "until=(end.done, end.position) if end.open else None",
        'until=("1:1:", end.position) if end.open else None',
        f"{STREAMS}::test_the_rows_between_any_two_offsets_are_those_of_the_micro_batches_between",
    ),
    mutant(
        "a set-back stream goes on in silence",
        STREAM,
        "    if given.batch > known.batch:\n",
        "    if given.batch > known.batch + 9:\n",
        f"{STREAMS}::test_a_database_that_was_set_back_is_refused_and_a_new_checkpoint_goes_on",
    ),
    mutant(
        "a repaired broker's old offsets are taken for its own",
        STREAM,
        "    if given.incarnation != own.incarnation:\n",
        "    if given.incarnation < 0:\n",
        f"{STREAMS}::test_a_database_in_another_cluster_is_refused_until_it_is_rebased"
        "_and_then_by_its_checkpoint",
    ),
    mutant(
        "two queries of one subscription both commit",
        STREAM,
        "SET epoch = c.epoch + 1 FROM",
        "SET epoch = c.epoch FROM",
        f"{STREAMS}::test_of_two_queries_of_one_subscription_the_older_ends_and_says_why",
    ),
    mutant(
        "a stream reads what the source could still lose",
        STREAM,
        "SELECT set_config('synchronous_commit', 'on', true))\nUPDATE saf.cursor c SET open",
        "SELECT set_config('synchronous_commit', 'off', true))\nUPDATE saf.cursor c SET open",
        "contract/test_6_durable.py::test_a_stream_reads_nothing_that_the_source_could_still_lose",
    ),
    mutant(
        "a batch is complete as soon as it is opened",
        STREAM,
        "UPDATE saf.cursor c SET open = %(open)s::pg_snapshot, batch",
        "UPDATE saf.cursor c SET done = %(open)s::pg_snapshot, open = %(open)s::pg_snapshot, batch",
        f"{STREAMS}::test_a_purge_keeps_what_is_not_committed_and_takes_it_afterwards",
    ),
    mutant(
        "a stream that pauses keeps its last messages for ever",
        READER,
        "return replace(start, settled=True)",
        "return start",
        f"{STREAMS}::test_a_purge_keeps_what_is_not_committed_and_takes_it_afterwards",
    ),
    mutant(
        "a trigger reads one message too many",
        OFFSET,
        "number <= {most_rows}",
        "number <= {most_rows} + 1",
        f"{STREAMS}::test_as_many_rows_as_are_asked_for_and_no_more",
    ),
    mutant(
        "one broker that is down stops the stream of all",
        READER,
        "                if all_of_them:\n",
        "                if True:\n",
        f"{STREAMS}::test_a_broker_that_is_down_is_passed_by_and_its_messages_come_later",
    ),
    mutant(
        "a micro-batch that a table has is appended again",
        TABLE,
        "        if last == number:\n",
        "        if last == -1:\n",
        f"{LAKE}::test_each_is_there_once_in_a_commit_of_its_own",
    ),
    mutant(
        "a commit does not say which micro-batch it is",
        TABLE,
        "numbers = [(application, number)]",
        "numbers = []",
        f"{LAKE}::test_of_two_drivers_with_the_same_one_the_second_finds_it_there",
    ),
    mutant(
        "a table that was set back goes on in silence",
        TABLE,
        "        if number > 0 and last != number - 1:\n",
        "        if last == number - 99:\n",
        f"{LAKE}::test_a_table_that_lacks_what_was_before_is_refused",
    ),
    mutant(
        "dates are counted as Python has them",
        "saf/destinations/delta/files.py",
        "ends.cast(pa.string()) if pa.types.is_date(ends.type) else ends",
        "ends",
        f"{LAKE}::test_columns_of_any_type_are_written_and_found_by_what_they_hold",
    ),
    mutant(
        "a table that was just made is not durable",
        TABLE,
        "                    sync(table, self._files, max(table.version() - RECENT, -1))\n"
        "                    counted",
        "                    counted",
        f"{LAKE}::test_a_table_that_was_just_made_is_durable_before_its_first_micro_batch_is_"
        "acknowledged",
    ),
    mutant(
        "files that were written for nothing stay",
        TABLE,
        "                self._files.remove(file.path for file in written)\n",
        "",
        f"{LAKE}::test_of_two_drivers_with_the_same_one_the_second_finds_it_there",
    ),
    mutant(
        "rows without a value for the partition are left out",
        "saf/destinations/delta/files.py",
        "pc.is_null(values) if value is None else pc.equal(values, value)",
        "pc.equal(values, value)",
        f"{LAKE}::test_a_query_by_any_column_finds_its_rows",
    ),
    mutant(
        "an empty text becomes NULL in silence",
        TABLE,
        'if "" in rows[name].unique().to_pylist():',
        "if False:",
        f"{LAKE}::test_an_empty_text_that_would_become_null_is_refused",
    ),
]
