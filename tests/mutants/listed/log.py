"""The mechanism: cursors, shards, members, the ring."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

CURSOR, SHARDS, RING = "saf/log/cursor.py", "saf/log/shards.py", "saf/log/ring.py"
READ = "saf/log/read.py"
OWNERS, NO_LOSS, FENCED = (
    "contract/test_owners.py",
    "contract/test_2_no_loss.py",
    "contract/test_5_fenced.py",
)
DURABLE = (
    "contract/test_6_durable.py::"
    "test_what_has_to_be_known_before_anything_is_sent_is_durable_whatever_the_default"
)
THE_RING = "contract/test_ring.py"

FINDING, FOUND = "saf/log/finding.py", "contract/test_finding.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a search that goes on leaves out a step",
        FINDING,
        "after=min(page, pages.after)), *slots",
        "after=max(0, min(page, pages.after) - STEP_PAGES)), *slots",
        f"{FOUND}::test_a_search_whose_time_is_over_says_how_far_it_was_and_goes_on_there",
    ),
    mutant(
        "a message is looked for after its time only",
        FINDING,
        "for number, pages in enumerate(steps, start=1):",
        "for number, pages in enumerate([] if when else steps, start=1):",
        f"{FOUND}::test_a_message_that_lies_elsewhere_than_its_time_says_is_found_all_the_same",
    ),
    mutant(
        "the position may fall",
        CURSOR,
        "position = greatest(c.position, %(position)s)",
        "position = %(position)s",
        f"{OWNERS}::test_a_late_mark_does_not_take_a_position_back",
    ),
    mutant(
        "what was attempted may fall",
        CURSOR,
        "attempted = greatest(c.attempted, %(position)s)",
        "attempted = %(position)s",
        f"{OWNERS}::test_a_late_attempt_does_not_take_back_what_was_attempted",
    ),
    mutant(
        "the open is not durable",
        CURSOR,
        "set_config('synchronous_commit', 'on', true)",
        "current_setting('synchronous_commit')",
        DURABLE,
    ),
    mutant(
        "an attempt is not durable",
        CURSOR,
        """connection.execute(DURABLY)
    before""",
        """connection.execute("SET LOCAL synchronous_commit = off")
    before""",
        DURABLE,
    ),
    mutant(
        "a mark waits for the disk",
        CURSOR,
        "set_config('synchronous_commit', 'off', true)",
        "set_config('synchronous_commit', 'on', true)",
        DURABLE,
    ),
    mutant(
        "the epoch is not checked at the source",
        CURSOR,
        "AND c.epoch = mine.epoch AND",
        "AND",
        f"{OWNERS}::test_a_shard_that_went_and_came_back_takes_no_writes_of_before",
    ),
    mutant(
        "the owner is not checked at the source",
        CURSOR,
        "AND c.owner = %(owner)s AND c.epoch = mine.epoch AND",
        "AND c.epoch = mine.epoch AND",
        f"{OWNERS}::test_a_shard_that_nobody_owns_takes_no_writes",
    ),
    mutant(
        "the batch is not checked at the source",
        CURSOR,
        "AND c.batch = %(batch)s\n",
        "AND %(batch)s > 0\n",
        f"{FENCED}::test_a_task_of_a_closed_batch_cannot_move_the_position_of_the_next",
    ),
    mutant(
        "a write that changes fewer rows than it should passes",
        CURSOR,
        "if len(rows) < len(batch.epochs):",
        "if not rows:",
        f"{OWNERS}::test_a_shard_that_went_and_came_back_takes_no_writes_of_before",
    ),
    mutant(
        "what was in progress at the last snapshot is forgotten",
        READ,
        'return xmax, in_progress.split(",") if in_progress else []',
        "return xmax, []",
        f"{NO_LOSS}::test_a_late_committer_with_a_lower_id_is_not_lost",
    ),
    mutant(
        "a batch is read beyond its snapshot",
        READ,
        "AND pg_visible_in_snapshot(txid, {open}::pg_snapshot)",
        "AND {open}::pg_snapshot IS NOT NULL",
        f"{OWNERS}::test_a_batch_read_again_has_not_what_committed_since",
    ),
    mutant(
        "a batch is read in the order of transactions",
        CURSOR,
        """return f"{self.rows(columns)} ORDER BY id\"""",
        """return f"{self.rows([*columns, 'txid'])} ORDER BY txid\"""",
        "contract/test_3_order.py::test_an_older_transaction_that_got_the_lock_later_comes_later",
    ),
    mutant(
        "the position is sent again",
        CURSOR,
        "AND id > {{position}}",
        "AND id >= {{position}}",
        f"{OWNERS}::test_what_is_complete_is_not_read_again",
    ),
    mutant(
        "closing keeps the position",
        CURSOR,
        "open = NULL, position = 0, attempted = 0",
        "open = NULL, attempted = 0",
        f"{OWNERS}::test_closing_begins_the_next_batch_from_nothing",
    ),
    mutant(
        "closing keeps what was attempted",
        CURSOR,
        "open = NULL, position = 0, attempted = 0",
        "open = NULL, position = 0",
        f"{OWNERS}::test_closing_begins_the_next_batch_from_nothing",
    ),
    mutant(
        "batches are closed one by one",
        CURSOR,
        """    with connection.transaction():
        for batch in batches:
            finish(connection, batch)""",
        """    for batch in batches:
        finish(connection, batch)""",
        f"{OWNERS}::test_batches_are_closed_all_or_none",
    ),
    mutant(
        "shards opened together get numbers of their own",
        CURSOR,
        "batch = (SELECT max(batch) + 1 FROM n)",
        "batch = c.batch + 1",
        f"{OWNERS}::test_shards_that_are_opened_together_are_one_batch",
    ),
    mutant(
        "the release order ignores open batches",
        SHARDS,
        "ORDER BY open IS NULL DESC, shard DESC",
        "ORDER BY shard DESC",
        f"{OWNERS}::test_shards_without_an_open_batch_go_first",
    ),
    mutant(
        "members balance without waiting for their turn",
        SHARDS,
        "    connection.execute(TAKE_TURN, params)\n",
        "",
        f"{OWNERS}::test_members_balance_one_at_a_time",
    ),
    mutant(
        "a transaction id of 32 bits is taken for a whole one",
        SHARDS,
        '_FULL = f"{_NOW} - (({_NOW} - {{xid}}::text::bigint + 2147483648) & 4294967295)'
        ' + 2147483648"',
        '_FULL = "{xid}::text::bigint"',
        f"{OWNERS}::"
        "test_a_delivery_that_failed_is_told_by_its_transaction_also_after_ids_have_wrapped_around",
    ),
    mutant(
        "holding ignores the epoch",
        SHARDS,
        "(c.shard, c.epoch) IN (SELECT * FROM "
        "unnest(%(shards)s::smallint[], %(epochs)s::bigint[]))",
        "c.shard = ANY (%(shards)s::smallint[]) AND %(epochs)s::bigint[] IS NOT NULL",
        f"{OWNERS}::test_a_member_holds_a_shard_only_by_the_epoch_that_it_has_now",
    ),
    mutant(
        "a shard is acquired without a new epoch",
        SHARDS,
        "SET owner = %(member_id)s, epoch = epoch + 1,",
        "SET owner = %(member_id)s,",
        f"{FENCED}::test_the_epoch_rises_with_each_change_of_owner",
    ),
    mutant(
        "a member that has lost its lease lives on",
        SHARDS,
        "AND (m.lease_until < clock_timestamp() OR NOT",
        "AND (NOT",
        f"{FENCED}::"
        "test_a_killed_member_loses_its_shards_at_once_and_a_hanging_one_at_the_end_of_its_lease",
    ),
    mutant(
        "a member that was killed keeps its shards until its lease ends",
        SHARDS,
        " OR NOT {IS_PRESENT})",
        ")",
        f"{FENCED}::"
        "test_a_killed_member_loses_its_shards_at_once_and_a_hanging_one_at_the_end_of_its_lease",
    ),
    mutant(
        "a forgotten member renews its lease all the same",
        SHARDS,
        "if connection.execute(RENEW, params).fetchone() is None:",
        "if connection.execute(RENEW, params).rowcount < 0:",
        f"{FENCED}::test_a_zombie_cannot_advance_attempt_hold_or_close_at_the_source",
    ),
    mutant(
        "a member that stops counts for the shares",
        SHARDS,
        "AND NOT m.stopping\n",
        "\n",
        f"{OWNERS}::test_a_member_that_is_asked_to_stop_gets_no_share",
    ),
    mutant(
        "the remainder moves about",
        SHARDS,
        "key=lambda member: (-held[member], member)",
        "key=lambda member: member",
        "unit/test_shards.py",
    ),
    mutant(
        "the hash is not signed",
        SHARDS,
        "return value - (1 << 64) if value >> 63 else value",
        "return value",
        "unit/test_shards.py",
        "integration/test_shard_of.py",
    ),
    mutant(
        "who leaves takes the trace of a failure along",
        SHARDS,
        "            connection.execute(FREE, self._params)\n",
        "",
        f"{OWNERS}::test_that_a_delivery_failed_is_not_forgotten_when_its_shard_changes_hands",
    ),
    mutant(
        "leaving does not end the membership",
        SHARDS,
        "            connection.execute(LEAVE, self._params)\n",
        "",
        f"{OWNERS}::test_who_leaves_frees_its_shards_at_once",
    ),
    mutant(
        "a write of a cursor does not note that a delivery failed",
        SHARDS,
        "THEN 1 ELSE allowance END",
        "THEN allowance ELSE allowance END",
        f"{OWNERS}::test_that_a_delivery_failed_is_not_forgotten_when_its_shard_changes_hands",
    ),
    mutant(
        "acquiring does not note that a delivery failed",
        SHARDS,
        "SET owner = %(member_id)s, epoch = epoch + 1, {NOTE_FAILURE}",
        "SET owner = %(member_id)s, epoch = epoch + 1",
        f"{OWNERS}::test_that_a_delivery_failed_is_not_forgotten_when_its_shard_changes_hands",
    ),
    mutant(
        "a lease is renewed at its end",
        "saf/receiving/membership.py",
        "self.member.lease_seconds / 3",
        "self.member.lease_seconds",
        f"{OWNERS}::test_a_membership_is_renewed_well_before_its_lease_is_over",
    ),
    mutant(
        "a purge asks the first subscription only",
        RING,
        "GROUP BY 1, 2 ORDER BY 1, 2",
        "GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 1",
        f"{THE_RING}::test_a_slot_stays_whichever_subscription_it_is_that_needs_it",
    ),
    mutant(
        "a purge takes an inbox that nobody reads",
        RING,
        "    if not readers:\n",
        "    if not readers and slot.log == 'outbox':\n",
        f"{THE_RING}::test_an_inbox_that_nobody_has_subscribed_to_keeps_everything",
    ),
    mutant(
        "a shard without its cursor has completed everything",
        RING,
        "coalesce(c.done, '1:1:')",
        "coalesce(c.done, pg_current_snapshot())",
        f"{THE_RING}::test_a_shard_without_its_cursor_has_completed_nothing",
    ),
    mutant(
        "what came in after the survey is truncated too",
        RING,
        "if contents and _behind(",
        "if contents and not contents and _behind(",
        f"{THE_RING}::test_a_message_that_comes_after_the_archive_keeps_the_slot_even_if_it_is_forwarded",
    ),
    mutant(
        "a slot is truncated with what came in before the lock",
        RING,
        "obstacle = _obstacle(connection, slot, contents)",
        "obstacle = None",
        f"{THE_RING}::"
        "test_a_message_that_comes_after_the_archive_keeps_the_slot_even_if_it_is_forwarded",
    ),
    mutant(
        "the retention is not asked",
        RING,
        "    if youngest is not None and youngest < retention_seconds:\n"
        '        return replace(slot, state="retained")\n',
        "",
        f"{THE_RING}::test_nobody_waits_for_a_lock_on_a_slot_that_stays_for_its_age",
    ),
    mutant(
        "the current slot is purged",
        RING,
        "        if number != current and not empty:",
        "        if not empty:",
        f"{THE_RING}::test_a_slot_goes_once_every_subscription_has_completed_it",
    ),
    mutant(
        "rotating leads into a slot that is not empty",
        RING,
        "if sizes[current] or not sizes[(current + 1) % SLOTS]:",
        "if sizes[current]:",
        f"{THE_RING}::test_a_log_does_not_rotate_into_a_slot_that_still_holds_messages",
    ),
    mutant(
        "rotating stops one id short",
        RING,
        "left = SLOT_ROWS - next_id % SLOT_ROWS",
        "left = SLOT_ROWS - next_id % SLOT_ROWS - 1",
        f"{THE_RING}::test_a_quiet_log_leaves_its_slot_which_then_goes",
    ),
    mutant(
        "a purge waits for its lock without end",
        RING,
        '        connection.execute(LOCK_TIMEOUT, {"milliseconds": str(milliseconds)})\n',
        "",
        f"{THE_RING}::test_a_slot_that_someone_reads_is_skipped_in_time_and_no_writer_waits",
    ),
]
