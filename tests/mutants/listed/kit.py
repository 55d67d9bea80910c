"""The test kit, the demo's proof and the commands: they notice what they are there for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

CLOCK, DRAIN, SENT = "saf/testing/clock.py", "saf/testing/drain.py", "saf/testing/sent.py"
KIT, PROOF = "integration/test_testing.py", "saf_demo/proof.py"
PROVES = "integration/test_demo.py::test_the_proof_notices_what_it_is_there_for"
LISTING, CODES = "saf/cli/console.py", "saf/cli/console.py"

ALIVE, ALIVES = "saf/cli/alive.py", "integration/test_alive.py"
BESIDE, BESIDES = "saf/receiving/worker.py", "contract/test_beside.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a process that works is idle",
        ALIVE,
        "self._since, self._shown = now, 0",
        "self._shown = 0",
        "unit/test_doctests.py",
    ),
    mutant(
        "a loop whose source does not answer is idle",
        "saf/forwarding/forwarder.py",
        "if worked or self.roster.all_well or not (self.roster.brokers or self._fleets):",
        "if True:",
        f"{ALIVES}::test_a_loop_whose_source_does_not_answer_is_not_idle",
    ),
    mutant(
        "the broker that is waited for is not named",
        "saf/cli/brokers.py",
        "left = [name for name, job in jobs.items() if not job.done()]",
        "left = []",
        f"{ALIVES}::test_a_command_that_takes_long_shows_which_brokers_it_waits_for",
    ),
    mutant(
        "a worker beside an application outlives its block",
        BESIDE,
        "if not task.done():\n                self.stop()",
        "if task.done():\n                self.stop()",
        f"{BESIDES}::test_it_receives_while_the_block_runs_and_not_after_it",
    ),
    mutant(
        "an application begins without its worker",
        BESIDE,
        "if task.done():\n                task.result()",
        "if False:\n                task.result()",
        f"{BESIDES}::test_a_worker_that_cannot_receive_keeps_the_block_from_beginning",
    ),
    mutant(
        "a handler without parentheses is registered for nothing",
        BESIDE,
        "self._handlers.add(None, given, batch=batch)",
        "pass",
        "unit/test_decorators.py",
    ),
    mutant(
        "True is a key",
        "saf/message.py",
        "if isinstance(key, int) and not isinstance(key, bool):",
        "if isinstance(key, int):",
        "unit/test_message.py::test_a_key_of_another_type_is_refused_with_its_value",
    ),
    mutant(
        "time goes back",
        CLOCK,
        "if by <= timedelta(0):",
        "if by == timedelta.min:",
        f"{KIT}::test_time_goes_forward_only",
    ),
    mutant(
        "what waits for a person becomes due by time",
        CLOCK,
        "CASE WHEN {column} < {never} AND NOT {stays}",
        "CASE WHEN NOT {stays}",
        f"{KIT}::test_what_waits_for_a_person_is_not_due_however_long_it_waits",
    ),
    mutant(
        "a drain that leaves messages behind is none that fails",
        DRAIN,
        "problems += _left_behind(database, known)",
        "_left_behind(database, known)",
        f"{KIT}::test_whatever_keeps_a_message_from_being_handled_fails_the_drain",
    ),
    mutant(
        "messages that cause each other are drained for ever",
        DRAIN,
        "if problems or not (stored or deliveries):",
        "if True:",
        f"{KIT}::test_a_drain_handles_what_its_handlers_send_until_nothing_is_due",
    ),
    mutant(
        "two are one",
        SENT,
        "if len(found) == 1:",
        "if found:",
        f"{KIT}::test_one_is_exactly_one",
    ),
    mutant(
        "what has left its outbox is pending until its batch is closed",
        SENT,
        "AND o.id <= c.position))",
        "AND false))",
        f"{KIT}::test_what_has_left_is_not_pending_even_before_its_batch_is_closed",
    ),
    mutant(
        "the proof does not look at the order",
        PROOF,
        "count(*) FILTER (WHERE overtaken) AS out_of_order,",
        "count(*) FILTER (WHERE false) AS out_of_order,",
        PROVES,
    ),
    mutant(
        "the proof does not look at what was not sent",
        PROOF,
        "count(*) FILTER (WHERE sent_id IS NULL) AS not_sent,",
        "count(*) FILTER (WHERE false) AS not_sent,",
        PROVES,
    ),
    mutant(
        "the proof does not look at what was changed",
        PROOF,
        "count(*) FILTER (WHERE changed) AS changed,",
        "count(*) FILTER (WHERE false) AS changed,",
        PROVES,
    ),
    mutant(
        "a narrow terminal cuts what does not fit",
        LISTING,
        "lines += folded(cell, width, first, 2 * INDENT)",
        "lines += folded(cell, width, first, 2 * INDENT)[:1]",
        "unit/test_doctests.py",
    ),
]
