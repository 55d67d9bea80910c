"""Adoptions: each row of an outbox table once, in order, with nobody else's rights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

ADOPTION, ROWS, FIELDS = "saf/capture/adoption.py", "saf/capture/rows.py", "saf/capture/fields.py"
TESTS, COMMAND = "contract/test_adoption.py", "integration/test_adopt_command.py"

MUTANTS: list[Mutant] = [
    mutant(
        "rows that are kept are sent again when a table is adopted again",
        ADOPTION,
        'if shape.old and (before is None or shape.rows != "keep"):',
        "if shape.old:",
        f"{TESTS}::test_rows_that_are_kept_are_not_sent_again",
    ),
    mutant(
        "a row that the old relay has sent meanwhile is sent by saf as well",
        ROWS,
        'sql.SQL("{} AND {} RETURNING {}")',
        'sql.SQL("{} AND ({} OR true) RETURNING {}")',
        f"{TESTS}::test_a_relay_that_has_a_row_in_hand_is_waited_for",
    ),
    mutant(
        "rows that could not be deleted are sent",
        ADOPTION,
        "    if sent != settled:\n",
        "    if sent < settled:\n",
        f"{TESTS}::test_a_relay_that_locks_its_rows_may_run_meanwhile",
    ),
    mutant(
        "a mark may leave rows pending",
        ADOPTION,
        "    if still:\n",
        "    if still < 0:\n",
        f"{TESTS}::test_a_mark_that_leaves_rows_pending_is_refused",
    ),
    mutant(
        "writers wait for old rows as long as these take",
        ADOPTION,
        'f"{round(seconds * 1000)}ms"',
        '"0"',
        f"{TESTS}::test_old_rows_that_would_stop_writers_for_too_long_are_refused",
    ),
    mutant(
        "old rows are sent in one transaction, whatever their number",
        ADOPTION,
        "_take(connection, reviewed, CHUNK_ROWS)",
        "_take(connection, reviewed, None)",
        f"{TESTS}::test_most_old_rows_are_sent_before_writers_wait",
    ),
    mutant(
        "old rows are sent in the order of the primary key",
        ROWS,
        "[*([] if shape.order is None else [shape.order]), *shape.primary_key]",
        "[*shape.primary_key]",
        f"{TESTS}::test_old_rows_are_sent_in_the_order_of_a_column",
    ),
    mutant(
        "a random primary key counts as an order",
        ADOPTION,
        "table.columns[first] not in ORDERED",
        "table.columns[first] in ()",
        f"{TESTS}::test_a_primary_key_that_has_no_order_needs_a_column_that_has_one",
    ),
    mutant(
        "a row that is sent instead is written as well",
        ROWS,
        "    IF FOUND THEN\n        RETURN NULL;",
        "    IF FOUND THEN\n        RETURN NEW;",
        f"{TESTS}::test_a_writer_notices_nothing_unless_rows_are_not_written",
    ),
    mutant(
        "a row that does not match is neither sent nor written",
        ROWS,
        "    RETURN NEW;\nEND",
        "    RETURN NULL;\nEND",
        f"{TESTS}::test_rows_that_do_not_match_are_neither_sent_nor_touched",
    ),
    mutant(
        "rows that do not match are deleted",
        ROWS,
        'sql.SQL("saf_new AS new WHERE {}").format(expression(shape.condition))',
        'sql.SQL("saf_new AS new")',
        f"{TESTS}::test_rows_that_do_not_match_are_neither_sent_nor_touched",
    ),
    mutant(
        "a table is captured and adopted",
        ADOPTION,
        "    if any(item.called == shape.called for item in stored.listed(connection)):\n",
        "    if any(item.called == shape for item in stored.listed(connection)):\n",
        f"{TESTS}::test_a_table_is_captured_or_adopted_and_not_both",
    ),
    mutant(
        "what becomes of rows may change, and kept rows are sent again",
        ADOPTION,
        "before is not None and before.rows != shape.rows",
        "before is not None and before.rows is None",
        f"{TESTS}::test_a_change_that_could_send_rows_twice_is_refused",
    ),
    mutant(
        "an error shows a value of the row",
        ADOPTION,
        "raise _refused(connection, reviewed, error) from None",
        "raise ConfigurationError(reason_of(error)) from None",
        f"{TESTS}::test_an_error_of_an_expression_shows_no_value_of_a_row",
    ),
    mutant(
        "an expression may call what others can change",
        FIELDS,
        "    for called, owner in fetch(connection, CALLS):\n",
        "    for called, owner in fetch(connection, CALLS)[:0]:\n",
        f"{TESTS}::test_what_an_adoption_calls_may_not_be_changed_by_others",
    ),
    mutant(
        "the cast of a column to text may be anybody's",
        FIELDS,
        "        checked(label, values[target])\n",
        "",
        f"{TESTS}::test_what_an_adoption_calls_may_not_be_changed_by_others",
    ),
    mutant(
        "rows may claim headers of saf",
        FIELDS,
        "WHERE left(lower(saf_h.key), 4) <> 'saf-')",
        "WHERE left(saf_h.key, 4) <> 'saf-')",
        f"{TESTS}::test_values_become_the_fields_of_messages",
    ),
    mutant(
        "rights that the trigger lacks are found by the first writer",
        ADOPTION,
        '    for needed in ("SELECT", right):\n',
        '    for needed in ("SELECT",):\n',
        f"{TESTS}::test_the_owner_of_the_schema_needs_the_rights_that_the_trigger_uses",
    ),
    mutant(
        "Debezium's rows are sent although the connector has sent them",
        "saf/capture/layouts.py",
        "    if condition is None and layout.untold and declared.old:\n",
        "    if condition is None and layout.untold and not declared.old:\n",
        f"{TESTS}::test_debeziums_rows_become_messages",
    ),
    mutant(
        "what is written is not what was shown",
        "saf/cli/adopt.py",
        "    if review.statements != shown.statements:\n",
        "    if review is None:\n",
        f"{COMMAND}::test_a_table_that_changes_between_the_review_and_its_answer_is_not_adopted",
    ),
]
