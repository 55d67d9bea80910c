"""What becomes of messages that are transformed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

TRANSFORMING = "saf/engine/transforming.py"
UNIT = "unit/test_transforming.py"

MUTANTS: list[Mutant] = [
    mutant(
        "results that end too early leave messages out",
        TRANSFORMING,
        "            if batch is None:\n                raise Unavailable(",
        "            if batch is None:\n                return\n                raise Unavailable(",
        f"{UNIT}::test_results_that_end_too_early_leave_nothing_out",
    ),
    mutant(
        "what Spark breaks off is a message's fault",
        "saf/spark/items.py",
        "    except Exception as error:  # of Arrow",
        "    except ZeroDivisionError as error:  # of Arrow",
        f"{UNIT}::test_results_that_end_too_early_leave_nothing_out",
    ),
    mutant(
        "the rest of a message's results is in the next batch of Arrow",
        TRANSFORMING,
        "_last(self._ahead[-1]) > last)",
        "_last(self._ahead[-1]) >= last)",
        f"{UNIT}::test_results_meet_their_messages_whatever_chunks_and_batches_they_come_in",
    ),
    mutant(
        "messages behind one that has no result yet overtake it",
        TRANSFORMING,
        "return rows.slice(0, first), self.problems",
        "return rows.filter(pa.array(~self._mine(rows) | known)), self.problems",
        f"{UNIT}::test_parked_messages_without_a_result_yet_wait_and_those_behind_them_too",
    ),
    mutant(
        "rows without numbers have one id",
        TRANSFORMING,
        "| (alone[1:] < 0) | (alone[:-1] < 0)",
        "",
        f"{UNIT}::test_a_result_that_cannot_be_sent_makes_a_dead_letter_of_its_message_alone",
    ),
    mutant(
        "what counts for a message that is read again is what was made of it last",
        TRANSFORMING,
        "        made = table.filter(",
        "        others, table = self._now, table.slice(0, 0)\n        made = table.filter(",
        f"{UNIT}::test_what_is_kept_counts_and_what_is_new_is_kept_with_what_is_left_out",
    ),
    mutant(
        "what a transform has left out may be sent the next time",
        TRANSFORMING,
        "        count = nothing.num_rows\n",
        "        nothing = nothing.slice(0, 0)\n        count = nothing.num_rows\n",
        f"{UNIT}::test_what_is_kept_counts_and_what_is_new_is_kept_with_what_is_left_out",
    ),
    mutant(
        "a message that was sent becomes a dead letter, too",
        TRANSFORMING,
        "faults = self._faults.keys() - self._kept",
        "faults = self._faults.keys()",
        f"{UNIT}::test_a_message_with_kept_results_is_no_dead_letter_whatever_a_transform_makes_of_it_now",
    ),
    mutant(
        "what a router has led on goes as it was sent when its destination is back",
        TRANSFORMING,
        "            self._sent_to = memory.sent_to(_named(rows), self.routers)\n",
        "            self._sent_to = {}\n",
        f"{UNIT}::test_a_parked_message_that_its_router_has_led_on_needs_the_result_of_the_router",
    ),
    mutant(
        "what is kept goes with its batch, although its message is parked",
        "saf/engine/kept_results.py",
        '  AND NOT ({SET_ASIDE})\n"""\n\n# What is kept of a shard',
        '"""\n\n# What is kept of a shard',
        "spark/test_transforms.py::"
        "test_what_is_not_deterministic_is_the_same_when_a_destination_is_back",
    ),
    mutant(
        "what is kept of a dead letter goes with a purge",
        "saf/engine/kept_results.py",
        '  AND NOT ({SET_ASIDE})\n"""\n\n# To whom',
        '"""\n\n# To whom',
        "spark/test_transforms.py::"
        "test_a_dead_letter_is_retried_with_what_was_kept_of_it_which_goes_when_the_dead_letter_has_gone",
    ),
    mutant(
        "what is not deterministic is not written before it is sent",
        "saf/engine/task.py",
        "        self.transforming.keep(fit, self.source_session)\n",
        "",
        "spark/test_transforms.py::"
        "test_what_is_not_deterministic_is_the_same_everywhere_although_a_batch_is_read_again",
    ),
    mutant(
        "results that are not in their order leave messages out",
        TRANSFORMING,
        "if (np.diff(ids) < 0).any() or (where and _last(where[-1]) > ids[0]):",
        "if False:",
        f"{UNIT}::test_results_that_are_not_in_their_order_leave_nothing_out",
    ),
    mutant(
        "results after their end are left out",
        TRANSFORMING,
        "if self._ended and next(self._results, None) is not None:",
        "if False:",
        f"{UNIT}::test_results_that_are_not_in_their_order_leave_nothing_out",
    ),
]
