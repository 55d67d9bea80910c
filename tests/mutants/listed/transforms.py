"""What becomes of messages that are transformed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

TRANSFORMING = "saf/engine/transforming.py"
IN_STEP = "saf/engine/in_step.py"
EVALUATION = "saf/spark/evaluation.py"
LEFT_OUT = "crash/test_transforms_checked.py"
UNIT = "unit/test_transforming.py"

MUTANTS: list[Mutant] = [
    mutant(
        "left-out messages of a lane are counted again after a lost answer",
        "saf/engine/parked_lanes.py",
        "            set_aside.count_left_out(source, among=gone)",
        "            set_aside.count_left_out(source)",
        f"{LEFT_OUT}::test_an_answer_that_gets_lost_counts_nothing_twice",
    ),
    mutant(
        "results that end too early leave messages out",
        IN_STEP,
        '            raise Unavailable("Spark", "the evaluated rows are incomplete")',
        "            self._last = LAST\n            return",
        f"{UNIT}::test_results_that_end_too_early_leave_nothing_out",
    ),
    mutant(
        "headers that a transform gives are sent as they come",
        TRANSFORMING,
        'headers = as_written(now["headers"])',
        'headers = now["headers"]',
        f"{UNIT}::test_headers_of_any_form_are_sent_on_one_line_and_say_nothing_of_who_was_verified",
    ),
    mutant(
        "what Spark breaks off is a message's fault",
        "saf/spark/evaluation.py",
        "    except Exception as error:  # of Arrow",
        "    except ZeroDivisionError as error:  # of Arrow",
        f"{UNIT}::test_results_that_end_too_early_leave_nothing_out",
    ),
    mutant(
        "the rest of a message's results is in the next batch of Arrow",
        IN_STEP,
        "while self._last <= last:",
        "while self._last < last:",
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
        "| (number[1:] < 0) | (number[:-1] < 0)",
        "",
        f"{UNIT}::test_a_result_that_cannot_be_sent_makes_a_dead_letter_of_its_message_alone",
    ),
    mutant(
        "what counts for a message that is read again is what was made of it last",
        TRANSFORMING,
        "        results = table.filter(",
        "        others, table = self._now, table.slice(0, 0)\n        results = table.filter(",
        f"{UNIT}::test_what_is_kept_counts_and_what_is_new_is_kept_with_what_is_left_out",
    ),
    mutant(
        "what a transform has left out may be sent the next time",
        TRANSFORMING,
        "        count = left_out.num_rows\n",
        "        left_out = left_out.slice(0, 0)\n        count = left_out.num_rows\n",
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
        "        transforming.keep(fit, source)\n",
        "",
        "spark/test_transforms.py::"
        "test_what_is_not_deterministic_is_the_same_everywhere_although_a_batch_is_read_again",
    ),
    mutant(
        "results that are not in their order leave messages out",
        IN_STEP,
        "if numbers[0] < self._last or (numbers[1:] < numbers[:-1]).any():",
        "if False:",
        f"{UNIT}::test_results_that_are_not_in_their_order_leave_nothing_out",
    ),
    mutant(
        "results after their end are left out",
        IN_STEP,
        "            if next(self._batches, None) is not None:",
        "            if False:",
        f"{UNIT}::test_results_that_are_not_in_their_order_leave_nothing_out",
    ),
    mutant(
        "what is evaluated of parked messages is taken for the batch's",
        IN_STEP,
        "found = found.slice(start, end - start)",
        "found = found.slice(0)",
        "unit/test_in_step.py::test_answers_and_results_are_told_apart_whatever_batches_they_come_in",
    ),
    mutant(
        "what nobody needs any more is held",
        IN_STEP,
        'held[:] = [batch for batch in held if batch["id"][-1].as_py() >= first]',
        "held[:] = [*held]",
        "unit/test_in_step.py::test_no_more_is_held_for_a_consumer_than_up_to_the_messages_in_hand",
    ),
    mutant(
        "answers beside results come in no order",
        EVALUATION,
        "streams = not frames or (len(frames) == 1",
        "streams = not frames or (len(frames) >= 1",
        "spark/test_evaluation.py::"
        "test_with_both_each_message_arrives_once_in_the_order_of_its_key_also_after_a_crash",
    ),
    mutant(
        "for one expression at fault, the messages of all routers in SQL wait",
        "saf/spark/evaluation.py",
        "return of_each or dict",
        "return dict",
        "spark/test_evaluation.py::"
        "test_of_an_expression_that_spark_dies_of_only_its_routers_messages_wait",
    ),
]
