"""What jobs of Spark send."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

STAGING = "saf/sending/staging.py"
OUTGOING, SINK, COPYING = (f"saf/spark/table/{name}.py" for name in ("outgoing", "sink", "copying"))
SINKS = "contract/test_sinks.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a version is sent again",
        STAGING,
        "WHERE s.version < excluded.version\n",
        "WHERE s.version <= excluded.version\n",
        f"{SINKS}::test_a_version_that_was_sent_is_not_sent_again_nor_is_an_earlier_one",
    ),
    mutant(
        "a write whose answer got lost is sent again",
        STAGING,
        "WHERE s.version < excluded.version\n",
        "WHERE (s.version < excluded.version) IS NOT FALSE\n",
        f"{SINKS}::test_a_commit_that_is_tried_again_after_a_lost_answer_sends_nothing_more",
    ),
    mutant(
        "what a crash has taken is not missed",
        STAGING,
        "if fresh and removed != messages:",
        "if fresh and removed > messages:",
        f"{SINKS}::test_what_a_crash_of_the_server_takes_is_missed_and_nothing_is_sent",
    ),
    mutant(
        "partitions are sent as they come",
        SINK,
        "sorted(written, key=lambda message: message.partition)",
        "written",
        f"{SINKS}::test_messages_are_sent_together_in_the_order_of_partitions_and_rows",
    ),
    mutant(
        "a task that fails has staged what it had",
        COPYING,
        "            if kind is None:\n",
        "            if True:\n",
        f"{SINKS}::test_a_task_that_fails_leaves_nothing_and_a_job_that_fails_is_discarded",
    ),
    mutant(
        "a checkpoint that was set back sends in silence",
        SINK,
        "last > version:",
        "last > version + 9:",
        f"{SINKS}::test_an_epoch_that_comes_again_is_not_sent_and_an_older_one_is_refused",
    ),
    mutant(
        "orphans stay for ever",
        STAGING,
        "DELETE FROM saf.staged WHERE attempt < {NUMBERS",
        "DELETE FROM saf.staged WHERE attempt < 0 * {NUMBERS",
        f"{SINKS}::test_orphans_are_collected_by_a_purge_and_counted",
    ),
    mutant(
        "an empty key is sent",
        OUTGOING,
        '                pc.equal(column, ""),\n',
        "",
        f"{SINKS}::test_what_outbox_send_refuses_is_refused_in_the_same_words",
    ),
]
