"""Receiving: what is claimed, in which order it comes, and what becomes of what fails."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, harmless, mutant

PREFETCH, SAVEPOINTS = "saf/receiving/prefetch.py", "saf/receiving/savepoints.py"
PREFETCHED, SHARED = "contract/test_prefetch.py", "contract/test_savepoints.py"
CLAIM, READING, LINK, RECEIVE, DELIVERY, LANES = (
    "saf/receiving/claim.py",
    "saf/receiving/reading.py",
    "saf/receiving/link.py",
    "saf/receiving/receive.py",
    "saf/receiving/delivery.py",
    "saf/receiving/retries.py",
)
PROCESSORS, LOOP, INBOX, AWAITING = (
    "saf/receiving/processors.py",
    "saf/receiving/loop.py",
    "saf/receiving/inbox.py",
    "saf/setaside/unhandled.py",
)
RECEIVED, WORKER, OF_PROCESSORS = (
    "contract/test_receive.py",
    "contract/test_worker.py",
    "contract/test_processors.py",
)
STOPPING, UNHANDLED, LOGGED = (
    "contract/test_stopping.py",
    "contract/test_unhandled.py",
    "contract/test_failures_logged.py",
)
BLOCKED = (
    f"{WORKER}::test_a_key_stays_blocked_by_its_dead_letter_if_so_configured_until_it_is_decided"
)
KILLS = (
    f"{RECEIVED}::test_a_message_that_kills_its_receiver_is_handed_out_as_often_as_the_policy_says"
)

MUTANTS: list[Mutant] = [
    mutant(
        "what was delayed comes in the order of its ids",
        READING,
        "ORDER BY deliver_at, id LIMIT",
        "ORDER BY id LIMIT",
        f"{RECEIVED}::test_what_was_delayed_comes_in_the_order_of_its_times_and_before_the_rest",
    ),
    mutant(
        "a delivery is not in the order of its ids",
        READING,
        "    hand.messages.sort(key=_order)\n",
        "",
        f"{RECEIVED}::test_a_delivery_of_many_keys_is_in_the_order_of_their_ids",
    ),
    mutant(
        "two receivers have a shard in hand",
        CLAIM,
        "ORDER BY turn\nFOR UPDATE OF f SKIP LOCKED",
        "ORDER BY turn",
        f"{RECEIVED}::test_a_key_is_never_in_two_hands_and_other_shards_stay_free",
    ),
    mutant(
        "the block's own transaction counts as complete",
        CLAIM,
        "    now = without(now, int(transaction))\n",
        "",
        f"{RECEIVED}::test_what_the_block_sends_to_the_inbox_it_reads_is_received_next",
    ),
    mutant(
        "a cut that is not clean is taken",
        READING,
        "WHERE clean AND part >= 1",
        "WHERE part >= 1",
        f"{RECEIVED}::test_a_deep_backlog_of_transactions_that_overlap_is_read_in_the_order_of_ids",
    ),
    mutant(
        "a transaction that was committed inside of the block goes unnoticed",
        CLAIM,
        "AND pg_current_xact_id() = %(transaction)s::xid8",
        "AND %(transaction)s::xid8 IS NOT NULL",
        f"{RECEIVED}::test_a_block_that_commits_by_itself_is_refused_and_its_messages_come_again",
    ),
    mutant(
        "what another receiver has delivered is delivered again",
        PREFETCH,
        "WHERE f.position = m.was AND",
        "WHERE",
        f"{PREFETCHED}::test_what_another_receiver_has_delivered_meanwhile_is_not_delivered_again",
    ),
    mutant(
        "what was read ahead overtakes a dead letter that is retried",
        PREFETCH,
        " AND NOT {waits}",
        "",
        f"{PREFETCHED}::test_a_dead_letter_that_is_retried_goes_before_what_was_read_ahead",
    ),
    mutant(
        "who died with what somebody else had read ahead goes unnoticed",
        PREFETCH,
        "{failed} IS NOT TRUE AND ",
        "",
        f"{PREFETCHED}::test_who_died_with_what_another_has_read_ahead_is_noticed_and_counted",
    ),
    mutant(
        "what was read ahead and has expired since is handed out",
        PREFETCH,
        " AND (now() < m.expires_at) IS NOT FALSE",
        "",
        f"{PREFETCHED}::test_what_has_expired_since_it_was_read_is_a_dead_letter",
    ),
    mutant(
        "what is behind a delayed message is read ahead as if it were next to the one before",
        PREFETCH,
        "rows=mine[:plain],",
        "rows=mine,",
        f"{PREFETCHED}::test_what_is_delayed_among_what_is_read_ahead_comes_in_its_time",
    ),
    mutant(
        "a block that commits what was read ahead goes unnoticed",
        CLAIM,
        "hand.marked and is_marked(connection)",
        "hand.marked",
        f"{PREFETCHED}::test_a_block_that_commits_what_was_read_ahead_by_itself_is_refused",
    ),
    mutant(
        "a receiver stays with its shards for ever",
        PREFETCH,
        "time.monotonic() > self._until",
        "time.monotonic() > self._until + 3600",
        f"{PREFETCHED}::test_a_receiver_gives_a_shard_up_after_a_while",
    ),
    mutant(
        "what shares a savepoint with a failed handler is not done again",
        SAVEPOINTS,
        "            for one in others:\n                self.do(one, alone=True)\n",
        "",
        f"{SHARED}::test_when_one_of_many_fails_the_work_of_the_others_is_there_once",
    ),
    mutant(
        "what has expired is handed out",
        READING,
        "WHEN expires_at <= now() THEN {EXPIRED} WHEN",
        "WHEN expires_at < 'epoch' THEN {EXPIRED} WHEN",
        f"{RECEIVED}::test_an_expired_message_is_a_dead_letter",
    ),
    mutant(
        "what is delayed is handed out",
        READING,
        "WHEN deliver_at > now() THEN {LATE}",
        "WHEN deliver_at < 'epoch' THEN {LATE}",
        f"{RECEIVED}::test_deliver_at_is_honoured_and_nobody_waits_for_it",
    ),
    harmless(
        "shards that a member owns are looked at",
        CLAIM,
        "WHERE allowance IS NULL AND owner IS NOT DISTINCT FROM %(owner)s",
        "WHERE allowance IS NULL AND (owner IS NOT DISTINCT FROM %(owner)s OR true)",
        "whose a shard is, is asked again of the row as it is locked",
    ),
    mutant(
        "a member's shards are anybody's to try alone",
        CLAIM,
        "    WHERE f.owner IS NOT DISTINCT FROM %(owner)s\n",
        "    WHERE f.owner IS NOT DISTINCT FROM %(owner)s OR true\n",
        f"{RECEIVED}::test_a_shard_that_a_member_owns_is_nobody_elses_to_try",
    ),
    mutant(
        "a shard whose delivery failed is handed out as any other",
        CLAIM,
        "failed=frozenset(shard for shard, failed, *_ in locked if failed)",
        "failed=frozenset()",
        f"{RECEIVED}::"
        "test_what_rolls_back_once_comes_again_in_order_and_is_soon_handed_out_in_full",
    ),
    mutant(
        "an attempt more than the policy says is made",
        RECEIVE,
        "if number >= self.policy.max_attempts:",
        "if number > self.policy.max_attempts:",
        KILLS,
    ),
    mutant(
        "who receives beside processors is let in",
        RECEIVE,
        "        if members:\n",
        "        if members and not members:\n",
        f"{OF_PROCESSORS}::test_who_receives_from_what_processors_own_is_refused_or_gets_nothing",
    ),
    mutant(
        "a restored inbox is received from",
        RECEIVE,
        "            restored.refuse(link.raw)\n",
        "",
        "contract/test_rebase.py::test_a_restored_inbox_is_not_received_from",
    ),
    mutant(
        "autocommit is let in",
        LINK,
        "if claims and self._status() != TransactionStatus.INTRANS:",
        "if self._status() == TransactionStatus.UNKNOWN:",
        f"{RECEIVED}::test_an_engine_that_commits_each_statement_is_refused",
    ),
    mutant(
        "a permanent exception is tried again",
        LANES,
        "return attempts >= self.max_attempts or isinstance(error, self.permanent)",
        "return attempts >= self.max_attempts",
        f"{WORKER}::test_a_permanent_exception_is_not_tried_again",
    ),
    mutant(
        "the last attempt is followed by another one",
        LANES,
        "return attempts >= self.max_attempts",
        "return attempts > self.max_attempts",
        f"{WORKER}::test_after_its_attempts_a_message_is_dead_and_its_key_goes_on",
    ),
    mutant(
        "a key overtakes its message that was set aside in the same delivery",
        DELIVERY,
        "if not self._stopped or message.lane not in self._stopped:",
        "if message:",
        f"{WORKER}::test_a_message_that_fails_waits_with_its_key_and_others_go_on",
    ),
    mutant(
        "a key overtakes its messages that wait",
        DELIVERY,
        "self._messages = [one for one in self._messages if one.lane not in waiting]",
        "self._messages = list(self._messages)",
        f"{WORKER}::test_a_message_that_fails_waits_with_its_key_and_others_go_on",
    ),
    mutant(
        "a key that should be blocked goes on",
        DELIVERY,
        "elif self._policy.block:",
        "elif not self._policy:",
        BLOCKED,
    ),
    mutant(
        "a blocked key is due after a while",
        LANES,
        "make_interval(secs => wait), timestamptz '{BLOCKED}')",
        "make_interval(secs => wait), now())",
        BLOCKED,
    ),
    mutant(
        "what is handled counts though it was set aside",
        DELIVERY,
        "place not in self._dead and place < self._stopped.get(one.lane, len(self._messages))",
        "place not in self._dead",
        f"{RECEIVED}::test_neither_what_is_set_aside_nor_what_is_behind_it_counts_as_handled",
    ),
    mutant(
        "an error is kept with its NUL",
        "saf/setaside/isolation.py",
        'text.replace("\\0", "\\ufffd")',
        "text",
        "unit/test_doctests.py",
    ),
    mutant(
        "what was not handed out before a stop is complete",
        "saf/receiving/putting_back.py",
        "                hand.shards[shard].reopen(id_ - 1)\n",
        "                pass\n",
        f"{STOPPING}::test_what_was_put_back_of_many_keys_and_shards_comes_once_and_in_order",
    ),
    mutant(
        "a shard goes back behind what is complete",
        "saf/receiving/putting_back.py",
        "            if shard not in passed:",
        "            if shard not in {-1}:",
        f"{STOPPING}::test_a_batch_in_hand_is_finished_and_the_next_one_put_back",
    ),
    mutant(
        "messages of dialogs are put back as if they had not arrived",
        "saf/receiving/putting_back.py",
        "        if hand.spoken:\n",
        "        if hand.spoken and not back:\n",
        f"{STOPPING}::test_a_dialog_of_which_messages_were_put_back_goes_on_without_a_gap",
    ),
    mutant(
        "what was counted as tried is put back before it is given",
        DELIVERY,
        "self._stopping.is_set() and not first",
        "self._stopping.is_set()",
        f"{STOPPING}::test_the_message_of_a_counted_attempt_is_given_though_the_worker_was_told_to_stop",
    ),
    mutant(
        "a worker that takes too long to stop may still commit",
        "saf/receiving/stopping.py",
        "                shut([connection.fileno()])\n",
        "                connection.fileno()\n",
        f"{STOPPING}::test_a_worker_in_a_thread_that_is_not_done_in_time_can_commit_nothing_more",
    ),
    mutant(
        "who has no handler takes what waits for one",
        AWAITING,
        "AND %(types)s::text[] IS NULL",
        "AND true",
        f"{UNHANDLED}::test_a_worker_beside_lanes_that_it_cannot_handle_writes_nothing",
    ),
    mutant(
        "who takes all types leaves what waits for a handler",
        AWAITING,
        "AND %(types)s::text[] IS NULL",
        "AND false",
        f"{UNHANDLED}::test_who_receives_without_a_worker_gets_what_waits_for_a_handler",
    ),
    mutant(
        "to ask for a type reads the lanes that wait for another one",
        AWAITING,
        "          AND hashtextextended(b.message_type, 0) = hashtextextended(t.message_type, 0)\n",
        "",
        f"{UNHANDLED}::test_however_many_lanes_wait_for_a_type_to_ask_for_another_one_reads_none",
    ),
    mutant(
        "a lane does not say the type that it waits for a handler of",
        DELIVERY,
        "message_type=message.message_type if awaits_handler else None",
        "message_type=None",
        f"{UNHANDLED}::test_a_type_without_a_handler_waits_in_order_until_there_is_one",
    ),
    mutant(
        "a lane whose first message is tried still waits for a handler",
        LANES,
        "make_interval(secs => %(wait)s), {FOR_ALL}",
        "make_interval(secs => %(wait)s)",
        f"{UNHANDLED}::test_a_type_without_a_handler_waits_in_order_until_there_is_one",
    ),
    mutant(
        "an operator's word makes lanes due that wait for a handler",
        "saf/setaside/waiting.py",
        "WHERE kind <> %(later)s AND NOT awaits_handler",
        "WHERE kind <> %(later)s",
        f"{UNHANDLED}::"
        "test_time_that_passes_and_an_operators_word_change_nothing_for_who_has_no_handler",
    ),
    mutant(
        "to wait for a handler is an attempt",
        DELIVERY,
        "self._stop(message, error, attempts=message.attempt - 1, awaits_handler=True)",
        "self._stop(message, error, attempts=message.attempt, awaits_handler=True)",
        f"{UNHANDLED}::test_a_type_without_a_handler_waits_in_order_until_there_is_one",
    ),
    mutant(
        "the parameters of a statement are logged",
        "saf/receiving/failures.py",
        "one.hide_parameters = True",
        "one.hide_parameters = one.hide_parameters",
        f"{LOGGED}::test_sqlalchemys_parameters_are_not_logged",
    ),
    mutant(
        "a lane is read in no order",
        LANES,
        "WHERE {THIS_LANE} ORDER BY id LIMIT %(limit)s",
        "WHERE {THIS_LANE} ORDER BY id DESC LIMIT %(limit)s",
        f"{WORKER}::test_after_its_attempts_a_message_is_dead_and_its_key_goes_on",
    ),
    mutant(
        "delayed messages of a shard are due when the last one is",
        LANES,
        "ORDER BY deliver_at LIMIT 1",
        "ORDER BY deliver_at DESC LIMIT 1",
        f"{RECEIVED}::test_what_was_delayed_comes_in_the_order_of_its_times_and_before_the_rest",
    ),
    mutant(
        "a failed handler's work stays",
        SAVEPOINTS,
        "        self.raw.execute(UNDO)\n",
        "",
        f"{WORKER}::test_a_message_that_fails_waits_with_its_key_and_others_go_on",
    ),
    mutant(
        "what an instance remembers of a handler that failed stays",
        PROCESSORS,
        "_undone(self, message: Received) -> None:\n        self._live.forget(message.lane)",
        "_undone(self, message: Received) -> None:\n        del message",
        f"{OF_PROCESSORS}::test_what_an_instance_remembers_of_a_handler_that_failed_is_thrown_away",
    ),
    mutant(
        "instances of a lost transaction stay",
        PROCESSORS,
        "            self._live.throw_away(self._live.used_since(began))\n",
        "            pass\n",
        f"{OF_PROCESSORS}::"
        "test_a_transaction_that_is_lost_takes_along_the_instances_that_were_called_in_it",
    ),
    mutant(
        "a message without a key leaves its instance behind",
        PROCESSORS,
        "passivate(connection)\n            self._live.forget(message.lane)\n",
        "passivate(connection)\n",
        f"{OF_PROCESSORS}::test_an_instance_of_a_message_without_key_is_passivated_once",
    ),
    mutant(
        "an instance of a shard that was lost is passivated",
        PROCESSORS,
        "if (one.shard, one.epoch) not in held",
        "if one.shard < 0",
        f"{OF_PROCESSORS}::"
        "test_one_who_does_not_know_yet_that_it_was_taken_over_calls_nothing_on_its_instances",
    ),
    mutant(
        "instances of shards that go are not passivated",
        PROCESSORS,
        "member.balance(link.raw, partial(self._pass_on, link))",
        "member.balance(link.raw)",
        f"{OF_PROCESSORS}::"
        "test_a_sixth_member_takes_sixteen_of_a_hundred_shards_and_gives_them_back",
    ),
    mutant(
        "what is set aside counts as unread",
        INBOX,
        "since.id > c.position\n",
        "since.id > 0\n",
        f"{RECEIVED}::test_the_inbox_says_what_is_left_of_a_batch_in_hand",
    ),
    mutant(
        "a message is handled for the first time each time",
        INBOX,
        ".rowcount == 1",
        ".rowcount >= 0",
        "integration/test_receiving_page.py",
    ),
]
