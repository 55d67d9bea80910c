"""The test kit, the demo's proof and the commands: they notice what they are there for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

CLOCK, DRAIN, SENT = "saf/testing/clock.py", "saf/testing/drain.py", "saf/testing/sent.py"
KIT, PROOF = "integration/test_testing.py", "saf_demo/proof.py"
PROVES = "integration/test_demo.py::test_the_proof_notices_what_it_is_there_for"
LISTING, CODES = "saf/cli/console.py", "saf/cli/console.py"

MUTANTS: list[Mutant] = [
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
