"""Plans, rights read back, and a broker's first services."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

DIFFERENCE, GRANTED = "saf/operating/plans/difference.py", "saf/operating/plans/tables.py"
SERVICES = "saf/broker/services.py"
APPLIED, SERVED = "integration/test_apply.py", "integration/test_services.py"

MUTANTS: list[Mutant] = [
    mutant(
        "what no plan can say of one broker ends the export of all",
        "saf/operating/plans/file.py",
        'ConfigurationError(f"a plan cannot express an existing entry: {problems}") from None',
        "",
        "integration/test_apply.py::test_what_no_plan_can_say_is_a_problem_of_its_broker",
    ),
    mutant(
        "what a plan does not name goes without --prune",
        DIFFERENCE,
        "if key not in planned and prune and table.remove is not None:",
        "if key not in planned and table.remove is not None:",
        f"{APPLIED}::test_what_the_plan_does_not_name_stays_and_is_said_and_goes_with_prune",
    ),
    mutant(
        "a plan overruns what somebody has changed since it was shown",
        DIFFERENCE,
        "if now != shown or",
        "if",
        f"{APPLIED}::test_what_somebody_has_changed_since_it_was_shown_is_not_overrun",
    ),
    mutant(
        "a store where messages come in never gets its first services by a plan",
        DIFFERENCE,
        "refused: Mapping[str, int] = field(compare=False)",
        "refused: Mapping[str, int]",
        f"{APPLIED}::test_a_store_gets_its_first_services_while_messages_for_others_come_in",
    ),
    mutant(
        "the changes of a broker are not one transaction",
        DIFFERENCE,
        "    with connection.transaction():\n        now =",
        "    if connection:\n        now =",
        f"{APPLIED}::test_all_of_one_broker_is_one_transaction_and_another_is_done_all_the_same",
    ),
    mutant(
        "a plan changes what dialogs rely on",
        DIFFERENCE,
        "                if not table.changes:\n                    raise _fixed(change)\n",
        "",
        f"{APPLIED}::test_what_cannot_be_changed_is_named_before_anything_is_done",
    ),
    mutant(
        "rights that no kind gives are not seen",
        GRANTED,
        "more = [] if rights_of(kinds) == held else [OTHER]",
        "more: list[str] = []",
        f"{APPLIED}::test_rights_that_no_kind_gives_are_said_and_set_right",
    ),
    mutant(
        "a first service is created unawares",
        SERVICES,
        "if not refuse_others and (others := refused(connection, names)):",
        "if refuse_others and (others := refused(connection, names)):",
        f"{SERVED}::test_the_first_service_is_not_created_unawares_where_messages_for_others_are",
    ),
    mutant(
        "a new version may need a field that older bodies lack",
        "saf/operating/plans/compatibility.py",
        'if name not in old.get("required", ()):',
        "if False:",
        "unit/test_compatibility.py::test_a_break_names_the_field",
    ),
    mutant(
        "an upcaster from a version before the stored one counts",
        DIFFERENCE,
        "any(number in range(before, version) for number in",
        "any(number < version for number in",
        "contract/test_typed_messages.py::test_an_upcaster_counts_only_from_the_stored_version_on",
    ),
]
