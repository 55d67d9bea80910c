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
]
