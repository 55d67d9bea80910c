"""Fair receiving, and what is taken ahead of the position."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

FAIR, AHEAD, CLAIM, HAND, RECEIVE = (
    "saf/receiving/fair.py",
    "saf/receiving/ahead.py",
    "saf/receiving/claim.py",
    "saf/receiving/hand.py",
    "saf/receiving/receive.py",
)
PROMISES, TAKEN, TURNS = (
    "contract/test_fair.py",
    "contract/test_ahead.py",
    "unit/test_fair_turns.py",
)
ARRIVES = f"{PROMISES}::test_a_message_that_arrives_in_the_middle_of_a_backlog_is_seen"
EXTENDED = f"{PROMISES}::test_batches_that_are_extended_again_and_again_lose_and_repeat_nothing"
SERVICES = "integration/test_services.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a later message of a key overtakes an earlier one of another group",
        FAIR,
        "last[key] = turn = max(turn, last.get(key, 0.0))",
        "last[key] = turn",
        f"{TURNS}::test_messages_of_a_key_stay_in_order_whatever_their_groups_and_classes",
        f"{PROMISES}::test_a_key_with_two_groups_stays_in_order",
    ),
    mutant(
        "all messages are of one group",
        FAIR,
        "counts[group, class_] += 1",
        "group = None\n        counts[group, class_] += 1",
        f"{TURNS}::test_each_group_has_its_share_of_the_first_messages",
    ),
    mutant(
        "a weight makes a class lighter",
        FAIR,
        "counts[group, class_] / (1.0",
        "counts[group, class_] * (1.0",
        f"{TURNS}::test_a_class_gets_a_share_by_its_weight_and_the_lightest_stays_alive",
    ),
    mutant(
        "a plan hands out messages of a shard that was dropped",
        FAIR,
        "and self._order[self._at].shard not in self.shards:",
        "and False:",
        f"{TURNS}::test_a_plan_knows_what_is_left_of_each_shard_and_leaves_out_dropped_ones",
    ),
    mutant(
        "a plan is trusted after its batch was extended by another receiver",
        FAIR,
        "and shard.batch == plan.shards[number].batch",
        "",
        f"{PROMISES}::test_a_plan_is_not_trusted_after_another_receiver_has_extended_the_batches",
    ),
    mutant(
        "a batch that is complete and open hides what has arrived",
        FAIR,
        "| plan.complete",
        "",
        f"{PROMISES}::test_a_complete_batch_that_was_left_open_is_closed",
    ),
    mutant(
        "messages that were out of sight stay there until the plan is used up",
        FAIR,
        "                if not seat.left and shard.open is not None:\n"
        "                    self._lacks_messages = True\n",
        "",
        f"{PROMISES}::test_the_next_batch_of_a_deep_shard_is_seen_while_others_are_handled",
    ),
    mutant(
        "after its first batch, a deep shard has a batch for each transaction",
        "saf/receiving/reading.py",
        "(sum(count(*)) OVER before)::bigint / %(rows)s",
        "sum(count(*)) OVER before / %(rows)s",
        "contract/test_receive.py::"
        "test_a_deep_shard_of_many_small_transactions_is_read_in_few_batches",
    ),
    mutant(
        "an open batch is never extended",
        FAIR,
        "for number, first, position, beyond in fetch(raw, EXTENDED, params):",
        "for number, first, position, beyond in ():",
        ARRIVES,
    ),
    mutant(
        "an extended batch forgets what is complete beyond its position",
        FAIR,
        "            ahead.write(raw, reader, ids)",
        "            del ids",
        ARRIVES,
        EXTENDED,
    ),
    mutant(
        "an extended batch begins after a transaction that its predecessor saw in progress",
        FAIR,
        ">= began",
        "IS NOT NULL",
        EXTENDED,
    ),
    mutant(
        "a late message with a lower id counts as complete in an extended batch",
        FAIR,
        "pg_visible_in_snapshot(since.txid, c.open)\n           AND (since.id",
        "(since.id",
        EXTENDED,
    ),
    mutant(
        "a receiver looks for arrivals forever, and takes nothing",
        FAIR,
        "(self._is_old and not self._has_looked)",
        "self._is_old",
        ARRIVES,
    ),
    mutant(
        "a delivery that failed leaves no trace for a fair receiver",
        FAIR,
        "        for number in hand.failed:\n            hand.shards[number].allowance = 1\n",
        "",
        f"{PROMISES}::test_a_plan_is_not_continued_over_the_trace_of_another_receivers_failure",
    ),
    mutant(
        "only the second lock on a cursor sees whether the last delivery failed",
        CLAIM,
        "now or shard in failed",
        "now",
        f"{PROMISES}::test_a_delivery_that_is_rolled_back_is_handed_out_again_alone_and_in_order",
    ),
    mutant(
        "a fair receiver reads one of a deep backlog's shards only as far as the others",
        FAIR,
        "for _ in range(2):",
        "for _ in range(1):",
        f"{PROMISES}::"
        "test_a_tenant_whose_messages_share_the_shard_of_the_backlog_does_not_wait_for_it",
        f"{PROMISES}::test_ten_messages_behind_ten_thousand_of_another_tenant_are_among_the_first"
        "_two_hundred",
    ),
    mutant(
        "batches of a backlog within sight are cut",
        CLAIM,
        "batch = sight if messages < sight else max(FEWEST, sight // len(locked))",
        "batch = 0",
        f"{PROMISES}::"
        "test_a_tenant_whose_messages_share_the_shard_of_the_backlog_does_not_wait_for_it",
    ),
    mutant(
        "what is complete is handed out again",
        AHEAD,
        "            AND NOT id <@ c.beyond OFFSET 0",
        "            OFFSET 0",
        f"{TAKEN}::test_a_choice_that_is_older_than_the_locks_hands_nothing_out_again",
    ),
    mutant(
        "messages before the position are handed out again",
        AHEAD,
        "{OF_SERVICE} AND id > c.after",
        "{OF_SERVICE}",
        f"{TAKEN}::test_a_choice_that_is_older_than_the_locks_hands_nothing_out_again",
    ),
    mutant(
        "messages of a batch that is closed are handed out again",
        AHEAD,
        "AND NOT pg_visible_in_snapshot(txid, c.done)",
        "",
        f"{TAKEN}::test_a_choice_that_is_older_than_the_locks_hands_nothing_out_again",
    ),
    mutant(
        "a range of complete ids covers one that is left",
        AHEAD,
        "ranges[left[above - 1] + 1 if above else id_, last] = None",
        "ranges[left[above - 1] if above else id_, last] = None",
        f"{TURNS}::test_progress_covers_what_was_taken_and_nothing_that_is_left",
    ),
    mutant(
        "the position passes a message that is left",
        AHEAD,
        "left[0] - 1 if left",
        "left[0] if left",
        f"{TURNS}::test_progress_covers_what_was_taken_and_nothing_that_is_left",
    ),
    mutant(
        "prefetched messages are handed out although they were taken ahead",
        CLAIM,
        'MOVE_CURSORS.replace("saf.cursor c SET", "saf.cursor c SET epoch = c.epoch + 1,")',
        "MOVE_CURSORS + ''",
        f"{TAKEN}::"
        "test_a_receiver_that_has_prefetched_messages_does_not_hand_out_those_taken_since",
    ),
    mutant(
        "what is taken ahead is not remembered",
        CLAIM,
        "        if ahead and all_moved:",
        "        if False:",
        f"{TAKEN}::test_chosen_messages_are_received_once_and_the_others_in_their_order",
    ),
    mutant(
        "messages that a stop leaves are complete",
        HAND,
        "[id_ for id_ in self.taken if id_ <= position], None",
        "[*self.taken], None",
        f"{TAKEN}::test_messages_that_a_stop_leaves_are_put_back",
    ),
    mutant(
        "due messages wait while there is a backlog",
        FAIR,
        "        late = [shard for shard in hand.late if shard in clear]\n",
        "        late: list[int] = []\n",
        f"{PROMISES}::test_expired_and_delayed_messages_keep_their_fates",
    ),
    mutant(
        "a plan outlives the database that it was made for",
        FAIR,
        "if is_later\n            and",
        "if",
        f"{PROMISES}::test_a_plan_of_a_database_that_was_set_back_is_thrown_away",
    ),
    mutant(
        "each call of saf.receive makes a plan of its own",
        RECEIVE,
        "receiver.lend()",
        "receiver.unseen()",
        f"{PROMISES}::test_calls_of_receive_continue_with_one_plan",
    ),
    mutant(
        "messages that were put back are complete for a plan",
        FAIR,
        "            self._plan = None  # messages were put back",
        "            pass  # messages were put back",
        f"{PROMISES}::"
        "test_a_receiver_that_continues_after_it_has_put_messages_back_reads_them_again",
    ),
    mutant(
        "processors read a fair subscription",
        RECEIVE,
        'services.refuse_fair(found, "processors")',
        "pass",
        f"{PROMISES}::test_processors_do_not_read_a_fair_subscription",
    ),
    mutant(
        "dispatchers read a fair subscription",
        "saf/receiving/dispatch/dispatcher.py",
        'services.refuse_fair(found, "dispatchers")',
        "pass",
        f"{PROMISES}::test_dispatchers_do_not_read_a_fair_subscription",
    ),
    mutant(
        "a subscription becomes fair under its processors",
        "saf/broker/services.py",
        "if wanted and (members",
        "if not wanted and (members",
        f"{PROMISES}::test_a_subscription_with_processors_does_not_become_fair",
    ),
    mutant(
        "--unfair and --fair-by go together",
        "saf/cli/service.py",
        "if unfair and (fair_by or weights):",
        "if unfair and fair_by and weights:",
        f"{SERVICES}::test_a_mistake_is_answered_with_a_sentence_and_code_2",
    ),
]
