"""The broker itself: its repair, rights, schema, connections, and what is written of its errors."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

REBASE, MOVED, LINEAGE = (
    "saf/operating/repair/rebase.py",
    "saf/operating/repair/moved.py",
    "saf/log/lineage.py",
)
MOVES, COPIES = "moves/test_moves.py", "moves/test_copies.py"
HEALTH = "contract/test_health.py"
REBASED, HONEST = "contract/test_rebase.py", "contract/test_10_honest.py"

WHOLE, OWN = "contract/test_whole.py", "contract/test_own_settings.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a policy may hide rows from a session",
        "saf/database/bounds.py",
        "set_config('row_security', 'off', false)",
        "set_config('row_security', 'on', false)",
        f"{WHOLE}::test_rows_that_a_policy_hides_from_a_forwarder_at_work_are_not_passed_over",
    ),
    mutant(
        "NULL in an array is what the server takes it for",
        "saf/database/bounds.py",
        "set_config('array_nulls', 'on', false)",
        "current_setting('array_nulls')",
        f"{WHOLE}::test_where_array_nulls_is_off_messages_are_forwarded_and_received",
    ),
    mutant(
        "no policy is looked for at the first contact",
        "saf/broker/whole.py",
        "AS gone UNION ALL SELECT p.* FROM ({POLICIES}) AS p",
        "AS gone",
        f"{WHOLE}::test_rows_that_a_policy_hides_from_a_receiver_are_not_passed_over",
    ),
    mutant(
        "a store is not asked for its log at the first contact",
        "saf/destinations/postgresql/inbox.py",
        '        self._refuse_moved([what for _, what in cursor.ask(lineage.asked("inbox"))])\n',
        "",
        f"{HEALTH}::test_whoever_meets_a_store_refuses_one_that_is_not_healthy_by_name",
    ),
    mutant(
        "a store without saf's own rows is tried again",
        "saf/destinations/postgresql/inbox.py",
        "        whole.refuse(cursor.ask(whole.BOTH), database)\n",
        "",
        f"{WHOLE}::test_a_truncated_store_is_for_a_person_to_mend_and_no_message_is_given_up",
    ),
    mutant(
        "what hides a store's own rows is taken for a missing right",
        "saf/destinations/postgresql/inbox.py",
        "case Meaning.NO_RIGHT:",
        "case Meaning.DISK_FULL:",
        f"{WHOLE}::test_rows_that_a_policy_hides_at_a_store_are_named_before_anything_is_stored",
    ),
    mutant(
        "a receiver does not ask for its log",
        "saf/receiving/receive.py",
        '"inbox" if first else None',
        "None",
        f"{HEALTH}::test_whoever_meets_a_store_refuses_one_that_is_not_healthy_by_name",
    ),
    mutant(
        "a reader of Spark does not ask for its log",
        "saf/spark/table/part.py",
        "        check(connection, log)\n",
        "        check(connection, None)\n",
        f"{HEALTH}::test_whoever_meets_a_store_refuses_one_that_is_not_healthy_by_name",
    ),
    mutant(
        "a policy that is added beside the rules for senders hides rows until the next connection",
        "saf/broker/senders.py",
        "    whole.refuse(policies or (), connection.info.dbname)\n",
        "",
        f"{WHOLE}::"
        "test_a_policy_that_is_added_beside_the_rules_of_saf_sender_is_noticed_by_the_next_cycle",
    ),
    mutant(
        "a shard without a cursor is no matter",
        "saf/broker/whole.py",
        "HAVING count(c.shard) <> b.shards",
        "HAVING count(c.shard) = 0",
        f"{WHOLE}::test_each_of_saf_s_own_rows_that_is_gone_is_named",
    ),
    mutant(
        "a rebase updates published slots that have no identity",
        "saf/broker/whole.py",
        "    for slot, statement in product(slots, IDENTIFY):",
        "    for slot, statement in product([], IDENTIFY):",
        f"{WHOLE}::test_all_goes_on_where_a_publication_publishes_all_tables",
    ),
    mutant(
        "ids that were given twice are no identity of a published slot",
        "saf/broker/whole.py",
        "ON saf.{slot} (id, message_id, txid)",
        "ON saf.{slot} (id)",
        f"{WHOLE}::test_a_repair_gives_new_ids_to_messages_that_a_publication_publishes",
    ),
    mutant(
        "doubled rows are deleted of a log whose deletes are published",
        "saf/broker/whole.py",
        "    for name, _, others in found:\n        _publish(connection, name, others)\n",
        "",
        f"{WHOLE}::test_a_repair_removes_doubled_rows_that_a_publication_publishes",
    ),
    mutant(
        "deletes are published no more after a repair",
        "saf/broker/whole.py",
        'filter(None, (others, "delete"))',
        "filter(None, (others,))",
        f"{WHOLE}::test_a_repair_removes_doubled_rows_that_a_publication_publishes",
    ),
    mutant(
        "a table that is published without an identity is tried again",
        "saf/database/sqlstates.py",
        "    errors.ObjectNotInPrerequisiteState.sqlstate: Meaning.PUBLISHED,\n",
        "",
        f"{WHOLE}::test_a_table_that_cannot_be_changed_for_want_of_an_identity_has_a_meaning",
    ),
    mutant(
        "whose schema comes first is not asked of its own name",
        "saf/broker/whole.py",
        "'$user', rolname)",
        "'$user', '')",
        f"{WHOLE}::"
        "test_a_role_for_which_schema_saf_is_the_first_is_named_at_migrating_and_by_the_doctor",
    ),
    mutant(
        "a worker's own statements run as a handler's role",
        "saf/receiving/loop.py",
        "Savepoints(raw, delivery.take_own(), receiver.link.state)",
        'Savepoints(raw, delivery.take_own() and "SELECT", receiver.link.state)',
        f"{OWN}::test_what_a_handler_sets_is_no_matter_to_a_worker",
    ),
    mutant(
        "a delivery's own statements run as a block's role",
        "saf/receiving/delivery.py",
        "            claim.move(self._raw, hand, own)\n",
        "            claim.move(self._raw, hand)\n",
        f"{OWN}::test_what_a_block_sets_is_no_matter_to_its_delivery",
    ),
    mutant(
        "what a handler sets for the session holds for later deliveries",
        "saf/receiving/link.py",
        "format(name, value, pooled)",
        "format(name, value, True)",
        f"{OWN}::test_what_a_handler_sets_is_no_matter_to_a_worker",
    ),
    mutant(
        "a group may let a writer say which transaction has sent",
        "saf/broker/grants.py",
        "in forgers(connection, role) if kinds else ():",
        "in ():",
        "integration/test_forged.py::"
        "test_a_writer_has_no_more_rights_by_a_group_and_its_default_privileges",
    ),
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
        "listed = [*numbers, *in_progress]",
        "listed = numbers",
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
        MOVED,
        """AND ({{is_here}}) THEN 'p'""",
        """AND ({{is_here}}) THEN 'h'""",
        "contract/test_sent_before_a_repair.py::"
        "test_what_is_sent_between_a_restore_and_the_repair_follows_what_the_dump_had_pending",
    ),
    mutant(
        "the inbox is not rebased",
        REBASE,
        "for log in lineage.LOGS:\n                here",
        "for log in lineage.LOGS[:1]:\n                here",
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
        "saf/log/lineage.py",
        "WHERE system_identifier <> (SELECT",
        "WHERE system_identifier < 0 * (SELECT",
        f"{HEALTH}::test_a_source_of_another_cluster_is_refused_though_its_numbers_look_right",
    ),
    mutant(
        "a sequence that was set back is not noticed",
        LINEAGE,
        "WHERE highest > last\n",
        "WHERE highest < 0 * last\n",
        f"{MOVES}::test_what_was_sent_with_the_ids_of_older_messages_is_not_taken_for_them",
    ),
    mutant(
        "cursors that are older than what they count as complete are not noticed",
        LINEAGE,
        "(TO_COME, IN_PROGRESS, WRITTEN_AFTER, WRITTEN_BEFORE)",
        "(TO_COME, IN_PROGRESS, WRITTEN_BEFORE)",
        f"{HEALTH}::"
        "test_a_source_whose_cursors_are_older_than_what_they_count_as_complete_is_refused",
    ),
    mutant(
        "what logical replication brought is taken for written here",
        MOVED,
        "& 4294967295 OR {_AFTER_CURSOR})",
        "& 4294967295 OR true OR {_AFTER_CURSOR})",
        f"{MOVES}::test_logical_replication_to_a_new_server_loses_and_doubles_nothing",
    ),
    mutant(
        "what was sent since the transaction ids went back counts as complete",
        MOVED,
        "MovedBy.COPY: _AFTER_CURSOR,",
        'MovedBy.COPY: "false",',
        f"{COPIES}::test_after_a_reset_of_the_epoch_and_the_named_cure_new_messages_arrive",
    ),
    mutant(
        "an upgrade sends again what came since saf.timeline was rewritten",
        REBASE,
        "foreign = bool(lineage.foreign(connection))",
        "foreign = True",
        f"{COPIES}::"
        "test_what_was_rewritten_or_moved_within_its_cluster_is_not_sent_again_after_an_upgrade",
    ),
    mutant(
        "messages are known again by their ids alone",
        "saf/setaside/parking.py",
        "SELECT message_id FROM saf.parked\nWHERE subscription_id = %(subscription_id)s AND "
        "destination = %(destination)s\n  AND (id, message_id) IN (SELECT * FROM "
        "unnest(%(ids)s::bigint[], %(message_ids)s::uuid[]))",
        "SELECT (%(message_ids)s::uuid[])[array_position(%(ids)s::bigint[], id)] FROM saf.parked\n"
        "WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s\n"
        "  AND id = ANY (%(ids)s)",
        f"{MOVES}::test_what_was_sent_with_the_ids_of_older_messages_is_not_taken_for_them",
    ),
    mutant(
        "a row that stands twice is two messages to reconcile",
        "saf/operating/repair/reconcile/__init__.py",
        "    known = [*{(one.shard, one.id): one for one in reversed(rows)}.values()][::-1]\n",
        "    known = rows\n",
        "moves/test_restored_over.py::"
        "test_it_is_seen_and_nothing_that_is_stored_is_called_lost_or_sent_again",
    ),
    mutant(
        "a replay sends what was not announced",
        "saf/operating/repair/replay.py",
        "if len(found) > len({*announced}):",
        "if len(found) < 0:",
        "moves/test_restored_over.py::"
        "test_it_is_seen_and_nothing_that_is_stored_is_called_lost_or_sent_again",
    ),
    mutant(
        "a batch has a row twice",
        "saf/engine/task.py",
        "        if repeats.size:\n",
        "        if repeats.size < 0:\n",
        "moves/test_restored_over.py::"
        "test_messages_that_were_pending_then_and_now_are_not_stored_twice",
    ),
    mutant(
        "receivers get a message twice that stands twice",
        "saf/receiving/reading.py",
        "    refuse_doubled(connection, rows)\n",
        "",
        "contract/test_dispatch.py::test_messages_that_stand_twice_are_not_sent_until_the_repair",
        "moves/test_restored_over.py::"
        "test_messages_that_stand_twice_in_an_inbox_are_not_handed_out_twice",
    ),
    mutant(
        "dead letters are not found again after the clock went back",
        "saf/log/cursor.py",
        "now(), c.opened_at, c.set",
        "now(), c.set",
        "moves/test_clocks.py::"
        "test_a_forwarder_that_dies_after_the_clock_went_back_has_stored_nothing_twice",
    ),
    mutant(
        "what was parked when the clock was ahead waits",
        "saf/setaside/parking.py",
        "OR opened_at IS DISTINCT FROM {opened_at}::timestamptz)",
        "OR parked_at < {opened_at}::timestamptz)",
        "moves/test_clocks.py::"
        "test_what_an_earlier_batch_parked_goes_on_in_order_after_the_clock_went_back",
    ),
    mutant(
        "a rebase does not wait for members at work",
        REBASE,
        "        if members:\n",
        "        if not members and force:\n",
        f"{HONEST}::test_a_rebase_beside_a_member_at_work_is_refused",
    ),
    mutant(
        "a repair takes for set back who is being delivered to",
        "saf/operating/repair/send_again.py",
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
