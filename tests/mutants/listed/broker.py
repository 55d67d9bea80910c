"""The broker itself: its repair, rights, schema, connections, and what is written of its errors."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

REBASE = "saf/repair/rebase.py"
REBASED, HONEST = "contract/test_rebase.py", "contract/test_10_honest.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a server compiles the statements of a session",
        "saf/database/bounds.py",
        "set_config('jit', 'off', false)",
        "set_config('jit', current_setting('jit'), false)",
        "contract/test_hangs.py::"
        "test_no_session_of_ours_compiles_statements_which_takes_longer_than_to_run_them",
    ),
    mutant(
        "a session has the isolation that its database says",
        "saf/database/bounds.py",
        "set_config('default_transaction_isolation', 'read committed', false)",
        "current_setting('default_transaction_isolation')",
        "contract/test_hangs.py::"
        "test_transactions_of_ours_are_read_committed_whatever_the_database_s_default",
    ),
    mutant(
        "who sends may not execute what checks it",
        "saf/broker/grants.py",
        "if functions := EXECUTED.get((table, privilege)):",
        "if functions := EXECUTED.get((table, privilege[:0])):",
        "integration/test_grants.py::"
        "test_who_sends_may_execute_what_checks_it_where_functions_are_for_nobody_by_default",
    ),
    mutant(
        "a rebase misses transactions in progress",
        REBASE,
        "listed = [*mine, *in_progress]",
        "listed = mine",
        f"{REBASED}::test_what_is_in_progress_is_not_lost_though_younger_transactions_have_ended",
    ),
    mutant(
        "a rebase keeps its epoch",
        REBASE,
        "epoch = greatest(epoch, %(epoch)s) + 1",
        "epoch = epoch + 1 + 0 * %(epoch)s",
        f"{REBASED}::"
        "test_the_restored_source_is_newer_than_any_owner_that_the_destination_has_heard_of",
    ),
    mutant(
        "what is pending joins the batch in hand",
        REBASE,
        '"open": snapshot("p"),',
        '"open": snapshot(""),',
        f"{REBASED}::"
        "test_what_was_not_in_the_batch_in_hand_is_not_taken_for_complete_by_its_position",
    ),
    mutant(
        "what was sent since a restore goes before what the dump had pending",
        REBASE,
        """>= l.txid::text::bigint THEN 'p'""",
        """>= l.txid::text::bigint THEN 'h'""",
        "contract/test_sent_before_a_repair.py::"
        "test_what_is_sent_between_a_restore_and_the_repair_follows_what_the_dump_had_pending",
    ),
    mutant(
        "the inbox is not rebased",
        REBASE,
        'for log in ("outbox", "inbox"))',
        'for log in ("outbox",))',
        f"{REBASED}::test_of_a_restored_inbox_the_unread_is_received_and_the_read_is_not",
    ),
    mutant(
        "what is in hand counts as complete",
        REBASE,
        '"done": snapshot("hp"),',
        '"done": snapshot("p"),',
        f"{REBASED}::test_a_batch_in_hand_of_which_nothing_was_delivered_is_delivered",
    ),
    mutant(
        "a rebase goes on with the old batches' numbers",
        REBASE,
        "batch = batch + %(numbers)s FROM",
        "batch = batch + 0 * %(batches)s FROM",
        f"{HONEST}::"
        "test_a_source_set_back_to_an_older_backup_is_refused_by_the_destination_until_rebased",
    ),
    mutant(
        "a restored database is not refused",
        "saf/broker/restored.py",
        "system_identifier <> (SELECT",
        "system_identifier < 0 * (SELECT",
        f"{REBASED}::"
        "test_a_dump_is_refused_also_where_transaction_ids_have_got_farther_than_its_own",
    ),
    mutant(
        "a rebase does not wait for members at work",
        REBASE,
        "        if alive:\n",
        "        if not alive and force:\n",
        f"{HONEST}::test_a_rebase_beside_a_member_at_work_is_refused",
    ),
    mutant(
        "a repair takes for set back who is being delivered to",
        "saf/repair/send_again.py",
        "set_back(connection, name, known[name], before)",
        "set_back(connection, name, known[name])",
        "contract/test_set_back_topics.py::"
        "test_a_forwarder_at_work_does_not_make_a_store_look_set_back",
    ),
    mutant(
        "a refusal says only what was acknowledged",
        "saf/destinations/marks.py",
        'up to {self.position}" if self.number > (0, 0) else',
        'up to {self.position}" if self.batch >= 0 else',
        "contract/test_set_back.py::"
        "test_the_refusal_of_a_store_names_what_was_acknowledged_and_what_it_has",
    ),
]
