"""Schedules: each run once, when it is due, by whose leave, and what happens to missed ones."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

SQL, TIMES = "migrations/baseline/schedule.sql", "saf/schedules/times.py"
RUNNING, STORED = "saf/schedules/running.py", "saf/schedules/stored.py"
TESTS, UNIT = "contract/test_schedules.py", "unit/test_schedule_times.py"
COMMAND = "integration/test_schedule_command.py"

NOT_FOUND = "IF NOT FOUND THEN\n        RETURN false;\n    END IF;"

MUTANTS: list[Mutant] = [
    mutant(
        "a run is sent again by a forwarder that has read it before",
        SQL,
        "AND s.next_run = run_schedule.expected AND s.next_run <= clock_timestamp()",
        "AND s.next_run <= clock_timestamp()",
        f"{TESTS}::test_another_role_may_not_invent_runs",
    ),
    mutant(
        "forwarders send a run without a lock of its schedule",
        SQL,
        f"FOR NO KEY UPDATE SKIP LOCKED;\n    {NOT_FOUND}\n    IF run_schedule.problem",
        f";\n    {NOT_FOUND}\n    IF run_schedule.problem",
        f"{TESTS}::test_of_eight_forwarders_one_sends_the_message_of_each_run",
    ),
    mutant(
        "a forwarder waits for a run of another one",
        SQL,
        "AND NOT s.paused AND s.refused IS NULL\n    FOR NO KEY UPDATE SKIP LOCKED",
        "AND NOT s.paused AND s.refused IS NULL\n    FOR NO KEY UPDATE",
        f"{TESTS}::test_a_session_that_ends_within_a_run_sends_nothing_of_it",
    ),
    mutant(
        "a run mixes a schedule's old times with its new ones",
        SQL,
        "WHERE s.name = run_schedule.name AND s.version = run_schedule.version",
        "WHERE s.name = run_schedule.name",
        f"{TESTS}::test_a_run_that_was_read_before_a_change_is_not_sent",
    ),
    mutant(
        "rules are not asked when a schedule runs",
        SQL,
        "PERFORM saf.vouch(there.sender, there.from_service, there.to_service);\n        sent",
        "sent",
        f"{TESTS}::test_the_rules_of_senders_hold_when_it_is_added_changed_and_run",
    ),
    mutant(
        "anybody may change the schedules of others",
        SQL,
        "IF FOUND THEN\n        PERFORM saf.vouch(",
        "IF FALSE THEN\n        PERFORM saf.vouch(",
        f"{TESTS}::test_the_rules_of_senders_hold_when_it_is_added_changed_and_run",
    ),
    mutant(
        "runs during a pause are caught up",
        SQL,
        "next_run = CASE WHEN there.paused THEN greatest(there.next_run, $2)\n"
        "                        ELSE there.next_run END",
        "next_run = there.next_run",
        f"{TESTS}::test_runs_during_a_pause_are_not_sent_and_not_caught_up",
    ),
    mutant(
        "after a change a run comes again if the clock was set back",
        STORED,
        "SELECT greatest(moment, last_run)",
        "SELECT moment",
        f"{TESTS}::test_after_a_change_no_run_comes_again_even_if_the_clock_was_set_back",
    ),
    mutant(
        "a change of a schedule's message moves its next run",
        SQL,
        "next_run = CASE WHEN same_times THEN there.next_run ELSE put_schedule.next_run END",
        "next_run = put_schedule.next_run",
        f"{TESTS}::test_a_change_keeps_the_next_run_unless_the_times_change",
    ),
    mutant(
        "an application changes the schedules of another one",
        SQL,
        "IF there.origin IS DISTINCT FROM put_schedule.origin THEN",
        "IF false THEN",
        f"{TESTS}::test_declared_schedules_are_added_changed_and_reported_when_they_are_gone",
    ),
    mutant(
        "an hour that comes twice runs a schedule in the past",
        TIMES,
        "            if at > moment:\n                yield at",
        "            yield at",
        f"{UNIT}::test_a_schedule_that_begins_in_an_hour_that_comes_twice_runs_the_next_day",
    ),
    mutant(
        "a run that is a little late counts as missed",
        TIMES,
        'if missed == "none" and now - last > LATE:',
        'if missed == "none" and now > last:',
        f"{UNIT}::test_of_missed_runs_none_the_last_or_each_is_sent",
    ),
    mutant(
        "of missed runs the first is sent, not the last",
        TIMES,
        "return Step(due=last, skipped=skipped, next_run=following)",
        "return Step(due=due, skipped=skipped, next_run=following)",
        f"{TESTS}::test_missed_runs_are_skipped_or_the_last_or_all_are_sent",
    ),
    mutant(
        "the history of a schedule grows for ever",
        SQL,
        "ORDER BY o.run_id DESC OFFSET 20 LIMIT 1",
        "ORDER BY o.run_id DESC OFFSET 2000 LIMIT 1",
        f"{TESTS}::test_the_history_shows_runs_skipped_ones_and_extra_ones_and_is_bounded",
    ),
    mutant(
        "a schedule whose zone is unknown stops the forwarder",
        RUNNING,
        "    except UsageError as error:\n",
        "    except KeyError as error:\n",
        f"{TESTS}::test_a_schedule_whose_zone_a_forwarder_lacks_stops_with_the_reason",
    ),
    mutant(
        "a forwarder does not ask when a schedule is due",
        "saf/forwarding/moving.py",
        'DUE_IN = f"least({held.DUE_IN}, {running.DUE_IN})"',
        'DUE_IN = f"least({held.DUE_IN}, NULL)"',
        f"{TESTS}::test_a_forwarder_learns_from_one_question_what_is_due",
    ),
    mutant(
        "a body is shown in what a plan changes",
        "saf/operating/plans/difference.py",
        "if name in self.table.hidden:",
        "if False:",
        f"{COMMAND}::test_a_plan_has_schedules_shows_how_they_differ_and_is_exported",
    ),
]
