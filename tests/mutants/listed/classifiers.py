"""Classifiers that are functions of the database; limits and fairness of plans."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

FUNCTIONS, SERVICE = "saf/routing/functions.py", "saf/routing_service.py"
OF_FUNCTIONS = "contract/test_function_routers.py"
COMMANDS = "integration/test_function_router_commands.py"
TABLES, PLANNED = "saf/operating/plans/tables.py", "integration/test_apply.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a function with another signature classifies",
        FUNCTIONS,
        "if row[1] and row[2] and row[3]]",
        "if row[1] and row[2]]",
        f"{OF_FUNCTIONS}::test_something_else_than_a_function_of_a_body_is_refused_with_what_it_is",
    ),
    mutant(
        "a set of services is an answer",
        FUNCTIONS,
        "p.prokind = 'f' AND NOT p.proretset,",
        "p.prokind = 'f',",
        f"{OF_FUNCTIONS}::test_something_else_than_a_function_of_a_body_is_refused_with_what_it_is",
    ),
    mutant(
        "a role that may not look into the schema is not told what to grant",
        FUNCTIONS,
        "if calls and not (may_look and may_call):",
        "if calls and not may_call:",
        f"{COMMANDS}::test_a_role_that_may_not_call_it_is_told_what_to_grant",
    ),
    mutant(
        "a routing service begins without the right to call its function",
        SERVICE,
        "functions.check(raw, router, calls=True)",
        "functions.check(raw, router)",
        f"{COMMANDS}::test_a_role_that_may_not_call_it_is_told_what_to_grant",
    ),
    mutant(
        "a function finds the tables of whatever path the role has",
        FUNCTIONS,
        '            connection.execute(FOLLOW_PATH, {"path": name.path})\n',
        "",
        f"{OF_FUNCTIONS}::test_a_name_is_quoted_as_in_sql_and_tables_beside_the_function_are_found",
    ),
    mutant(
        "a name with a percent sign cannot be called",
        FUNCTIONS,
        'part.replace("%", "%%") for part in',
        "part for part in",
        f"{OF_FUNCTIONS}::test_a_name_is_quoted_as_in_sql_and_tables_beside_the_function_are_found",
    ),
    mutant(
        "a function leaves the session in another role",
        FUNCTIONS,
        "            if own:\n",
        "            if False:\n",
        f"{OF_FUNCTIONS}::test_what_it_does_to_the_session_s_settings_ends_with_the_call",
    ),
    mutant(
        "a missing table makes a dead letter of each message",
        "saf/engine/classifying.py",
        "_by_batch(answers, batch, of_messages)]",
        "_by_batch(answers, batch)]",
        f"{OF_FUNCTIONS}::test_an_error_that_is_not_about_a_message_makes_no_message_unresolved",
    ),
    mutant(
        "an error of a function ends the whole delivery",
        FUNCTIONS,
        "    with connection.transaction():\n        for some in",
        "    if connection:\n        for some in",
        f"{OF_FUNCTIONS}::test_an_error_or_no_answer_is_of_one_message_and_all_others_continue",
    ),
    mutant(
        "the writes of a function are undone with a message that cannot be sent on",
        SERVICE,
        "        with work.piece():  # its writes",
        "        if work.raw:  # its writes",
        f"{OF_FUNCTIONS}::test_what_it_has_written_stays_if_another_message_cannot_be_sent_on",
    ),
    mutant(
        "all bodies of a delivery are one parameter, however large",
        FUNCTIONS,
        "if size + len(body) > MOST_BYTES:",
        "if not groups:",
        f"{OF_FUNCTIONS}::test_many_large_bodies_take_several_calls",
    ),
    mutant(
        "a name is folded otherwise than in the server",
        FUNCTIONS,
        "letter.lower() if letter.isascii() else letter",
        "letter.lower()",
        f"{OF_FUNCTIONS}::test_a_name_is_read_as_postgresql_reads_it",
    ),
    mutant(
        "a forwarder is to call functions of the database",
        "saf/routing/routers.py",
        "if one.mode == REDIRECT and router.kind == FUNCTION:",
        "if False:",
        f"{OF_FUNCTIONS}::test_a_router_that_redirects_cannot_call_a_function_of_the_database",
    ),
    mutant(
        "a row lets a forwarder call a function of the database",
        "migrations/versions/0046_function_routers.py",
        "CHECK (mode = 'forward' OR kind <> 'function')",
        "CHECK (true)",
        f"{OF_FUNCTIONS}::test_a_router_that_redirects_cannot_call_a_function_of_the_database",
    ),
    mutant(
        "a dry run keeps the writes of a function",
        "saf/operating/dry_run.py",
        "connection.transaction(force_rollback=True)",
        "connection.transaction()",
        f"{OF_FUNCTIONS}::test_a_dry_run_asks_the_function_and_leaves_nothing",
    ),
    mutant(
        "fairness is never what the plan has",
        TABLES,
        '"priority_by": None if item.priority_by == CLASSES else item.priority_by,',
        '"priority_by": item.priority_by,',
        f"{PLANNED}::test_a_plan_is_applied_whole_and_the_second_time_there_is_nothing_to_do",
    ),
    mutant(
        "fairness that a plan does not name stays with --prune",
        TABLES,
        "        remove=lambda connection, key, _: services.set_fairness(connection, *key),\n",
        "",
        f"{PLANNED}::test_limits_and_fairness_follow_the_plan_and_pauses_stay",
    ),
]
