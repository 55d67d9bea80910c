"""What operators see and decide about held messages: every message, no other, and only once."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

HELD, DECIDE, JOURNEY = (
    "saf/operating/held.py",
    "saf/operating/decide.py",
    "saf/operating/journey.py",
)
CLI, DOCTOR = "saf/cli/held.py", "saf/operating/doctor/messages.py"
COMMANDS, UI = "integration/test_held_commands.py", "ui/test_ui_held.py"
EXAMINED, FIGURES = "integration/test_doctor.py", "integration/test_metrics.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a decision waits for a held message that a sender has locked",
        HELD,
        "FOR UPDATE OF h SKIP LOCKED",
        "FOR UPDATE OF h",
        f"{COMMANDS}::test_a_message_that_another_transaction_has_locked_stays",
    ),
    mutant(
        "nobody hears of the held messages that a decision skipped",
        CLI,
        "left = before.messages - len(ids)",
        "left = 0",
        f"{COMMANDS}::test_a_message_that_another_transaction_has_locked_stays",
    ),
    mutant(
        "an operator gives a signed message a time that it was not signed for",
        HELD,
        "name IS NULL AND headers ? 'saf-signature'",
        "false AND headers ? 'saf-signature'",
        f"{COMMANDS}::test_a_signed_message_without_a_name_keeps_its_time",
    ),
    mutant(
        "an operator moves a message to a time after it expires",
        HELD,
        "WHEN expires_at <= CAST(",
        "WHEN false AND expires_at <= CAST(",
        f"{COMMANDS}::test_a_message_that_expires_before_a_time_is_not_moved_to_it",
    ),
    mutant(
        "a message that an operator has cancelled is not found by its name",
        HELD,
        "self.names: list[str | None] = [name for *_, name in rows]",
        "self.names = None",
        f"{COMMANDS}::test_cancelling_asks_loses_only_what_it_counted_and_is_audited",
    ),
    mutant(
        "a message that was refused stays refused after a decision",
        HELD,
        "due), refused = NULL",
        "due), refused = refused",
        f"{COMMANDS}::test_retrying_concerns_refused_messages_only",
    ),
    mutant(
        "a message that is due later is called overdue",
        HELD,
        "WHEN h.due <= clock_timestamp() THEN",
        "WHEN h.due >= clock_timestamp() THEN",
        f"{COMMANDS}::test_the_states_are_those_of_the_database",
    ),
    mutant(
        "a page of held messages begins after all that are due at one time",
        HELD,
        "ELSE (due, held_id) > (%(after_due)s, %(after)s) END)",
        "ELSE due > %(after_due)s END)",
        f"{COMMANDS}::test_messages_that_are_due_at_one_time_follow_each_other_in_pages",
    ),
    mutant(
        "a cancelled message stays held",
        DECIDE,
        'LOSES = ("discard", "cancel")',
        'LOSES = ("discard",)',
        f"{COMMANDS}::test_cancelling_asks_loses_only_what_it_counted_and_is_audited",
    ),
    mutant(
        "a retry on the dashboard concerns messages that were not refused",
        DECIDE,
        'return replace(chosen, state="refused")',
        "return chosen",
        f"{UI}::test_only_refused_messages_are_retried",
    ),
    mutant(
        "a retry concerns messages that were not refused",
        CLI,
        "make=partial(_chosen, refused=True)",
        "make=_chosen",
        f"{COMMANDS}::test_retrying_concerns_refused_messages_only",
    ),
    mutant(
        "the doctor reports a message as soon as it is due",
        DOCTOR,
        "AND h.due < clock_timestamp() - make_interval(secs => %(seconds)s)",
        "AND h.due < clock_timestamp() - make_interval(secs => 0 * %(seconds)s)",
        f"{EXAMINED}::test_held_messages_that_nobody_moves_are_found_after_minutes",
    ),
    mutant(
        "the doctor names no rule that a refused message lacks",
        DOCTOR,
        "THEN 'allowed' ELSE 'forbidden' END",
        "THEN 'allowed' ELSE 'allowed' END",
        f"{EXAMINED}::test_refused_messages_are_found_by_role_with_the_rule_that_is_missing",
    ),
    mutant(
        "no figure shows that a held message is overdue",
        "saf/operating/figures.py",
        "yield _age(m.OVERDUE, next_due, broker)",
        "yield _sample(m.OVERDUE, 0, broker)",
        f"{FIGURES}::test_a_message_becomes_overdue_while_nothing_is_committed",
    ),
    mutant(
        "a held message is nowhere when an operator asks by its id",
        JOURNEY,
        "held=later if sent is None else None,",
        "held=None,",
        f"{COMMANDS}::test_a_held_message_says_until_when_and_by_name_a_sent_one_leads_to_its_trace",
    ),
]
