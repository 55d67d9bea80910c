"""Forwarding: the driver, its sources and tasks, what it reads and reports."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, harmless, mutant

FORWARD, BROKER, PLAN = (
    "saf/forwarding/forwarder.py",
    "saf/forwarding/broker.py",
    "saf/forwarding/surveys.py",
)
STORING, SORTING, SUMMARY = (
    "saf/engine/storing.py",
    "saf/engine/parts.py",
    "saf/forwarding/summary.py",
)
FORWARDER, OWNERS, ISOLATED = (
    "contract/test_forwarder.py",
    "contract/test_owners.py",
    "contract/test_7_isolated.py",
)
COUNTED = "contract/test_by_service.py"
SURVEYS = "contract/test_surveys.py"
PURGING = "contract/test_purging.py"
SLOW = "contract/test_slow_sources.py"
VIGIL = "contract/test_vigil.py"
PLANNED, SUMMED = "unit/test_plan.py", "unit/test_summary.py"
REJECTED = (
    f"{ISOLATED}::test_a_rejected_message_becomes_a_dead_letter_and_its_neighbours_are_delivered"
)
UNKNOWN = f"{ISOLATED}::test_messages_for_a_service_that_the_destination_does_not_know_wait_for_it"

POLLING = "contract/test_polling.py"
QUIET = "saf/forwarding/broker.py"

SESSION = "spark/test_session.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a quiet source is looked at whatever other databases do",
        QUIET,
        "            known is not None\n            and left == known\n",
        "            known is not None\n            and not known\n            and not running\n",
        f"{POLLING}::test_a_quiet_source_is_not_looked_at_because_other_databases_are_busy",
    ),
    mutant(
        "a sequence that stands still is enough to be quiet",
        QUIET,
        "            and left == known\n",
        "",
        f"{POLLING}::test_what_is_committed_late_is_found_though_no_id_was_drawn_since",
    ),
    mutant(
        "an id that was drawn since is not noticed",
        QUIET,
        "next_id == self._next_id, next_id",
        "True, next_id",
        f"{POLLING}::test_a_quiet_source_is_looked_at_again_as_soon_as_anything_is_committed",
    ),
    mutant(
        "a source is quiet for ever since it was only asked",
        QUIET,
        "        ):\n            return True\n",
        "        ):\n            self._at = snapshot\n            return True\n",
        f"{POLLING}::test_a_cursor_that_was_set_back_is_found_after_a_while",
    ),
    mutant(
        "a lane that a person makes is not noticed",
        QUIET,
        "            and not backoff.any_lane(connection, subscription_id)\n",
        "",
        f"{POLLING}::test_a_lane_that_a_person_makes_is_seen_at_a_quiet_source",
    ),
    mutant(
        "a quiet source is never looked at for certain",
        QUIET,
        "            and time.monotonic() < self._until\n",
        "",
        f"{POLLING}::test_a_cursor_that_was_set_back_is_found_after_a_while",
    ),
    mutant(
        "no room is made for the connections of many sources",
        "saf/database/connections.py",
        "_most = max(_most, MOST + 2 * (sources - 2))",
        "_most = max(_most, MOST)",
        "contract/test_connections.py::test_a_process_that_deals_with_many_sources_keeps_more",
    ),
    mutant(
        "a part is stored before what waits is set aside",
        "saf/engine/task.py",
        "        for part in [part for part in others if not self._waits(part, set_aside)]:\n",
        "        for part in others:\n",
        "contract/test_set_aside_crash.py::"
        "test_messages_behind_a_missing_route_are_not_lost_when_it_leads_on_after_a_crash",
    ),
    mutant(
        "a giant that has given way goes on chunk by chunk",
        FORWARD,
        "        if gave_way:\n            self.roster.each(SourceBroker.take_back_stop, deep)\n",
        "",
        f"{FORWARDER}::test_a_giant_that_has_given_way_goes_on_whole_in_the_next_cycle",
    ),
    mutant(
        "a drain ends while a task has left some of its work",
        FORWARD,
        "unfinished = done[name] < shards",
        "unfinished = done[name] <= 0",
        f"{FORWARDER}::test_a_drain_goes_on_while_a_task_has_left_some_of_its_work",
    ),
    mutant(
        "of a JVM that hangs, only the connections are cut",
        "saf/spark/session.py",
        "        gateway.proc.kill()\n",
        "        pass\n",
        f"{SESSION}::test_a_jvm_that_hangs_when_it_is_to_end_is_killed",
    ),
    mutant(
        "a JVM that has ended is asked again",
        "saf/spark/session.py",
        "    _forget_ended_jvm()\n    if",
        "    if",
        f"{SESSION}::test_after_a_jvm_was_killed_the_process_gets_a_new_one_that_reads_and_filters",
    ),
    mutant(
        "the session of a JVM that has ended stays PySpark's default",
        "saf/database/pinned.py",
        "        context._jsc = None\n        context.stop()\n",
        "        kind._active_spark_context = None\n",
        f"{SESSION}::test_after_a_jvm_was_killed_the_process_gets_a_new_one_that_reads_and_filters",
    ),
    mutant(
        "all settings are on the command line of the JVM",
        "saf/spark/session.py",
        "for name, value in conf.items() if name in OF_JVM",
        "for name, value in conf.items()",
        f"{SESSION}::test_no_setting_is_on_a_command_line",
    ),
    mutant(
        "a JVM that hangs is asked to stop, after it was given up",
        "saf/spark/runner.py",
        "        self._spark = None\n        session.abandon()",
        "        session.abandon()",
        f"{SESSION}::test_a_driver_ends_whose_jvm_hangs_and_is_somebody_else_s",
    ),
    mutant(
        "the end of a process waits for a call that hangs",
        "saf/database/background.py",
        "daemon=True",
        "daemon=False",
        f"{SESSION}::test_a_driver_ends_whose_jvm_hangs_and_is_somebody_else_s",
    ),
    mutant(
        "a drain whose jobs fail each time never ends",
        FORWARD,
        "                    self._leave_to_another_run()\n",
        "                    pass\n",
        f"{FORWARDER}::test_a_drain_whose_jobs_fail_each_time_ends_and_says_so",
    ),
    mutant(
        "a broker that leaves its fleet is let go in the middle of its work",
        "saf/forwarding/roster.py",
        "        self._heard = True\n",
        "        self._enlist()\n",
        "contract/test_dropped_databases.py::"
        "test_a_database_that_leaves_its_fleet_while_it_is_at_work_is_let_go_after_it",
    ),
    mutant(
        "a loop waits for ever for a Spark that hangs between two cycles",
        FORWARD,
        "            if waited > within:",
        "            if False:",
        f"{FORWARDER}::test_a_runner_that_does_not_answer_is_given_up_and_its_shards_are_free",
    ),
    mutant(
        "a job that has not begun is waited for, however long Spark says nothing",
        FORWARD,
        "if not vigil.heard and now",
        "if False and now",
        f"{FORWARDER}::test_a_job_that_does_not_begin_is_waited_for_as_long_as_the_runner_answers",
    ),
    mutant(
        "a loop that always has work never purges",
        FORWARD,
        "                if not self._stop:\n                    self.purging.start",
        "                if not (worked or self._stop):\n                    self.purging.start",
        f"{PURGING}::test_a_loop_that_always_has_work_purges_all_the_same",
    ),
    mutant(
        "a loop does not wait for its purges when it ends",
        FORWARD,
        "            self._finish_purges()\n        finally:\n"
        "            self._leave()\n        whole",
        "        finally:\n            self._leave()\n        whole",
        f"{PURGING}::test_forwarding_does_not_wait_for_a_purge_and_a_loop_that_ends_does",
    ),
    mutant(
        "a run keeps its shards while it waits for its purges",
        FORWARD,
        "        self.roster.leave()  # to archive",
        "        # to archive",
        f"{PURGING}::test_a_run_that_waits_for_its_purges_has_left_its_shards_to_others",
    ),
    mutant(
        "a task that has ended is taken for a silent one",
        "saf/engine/source_session.py",
        "connection.execute(pulse.END)",
        "pass",
        f"{VIGIL}::test_a_task_that_has_ended_is_not_taken_for_a_silent_one_while_others_work",
    ),
    mutant(
        "a driver that has slept gives up tasks that have slept too",
        "saf/forwarding/runner.py",
        "            self._awake_since = self._heard_at = now\n",
        "",
        f"{VIGIL}::test_what_the_driver_has_slept_through_counts_for_nothing_and_then_a_silence_counts",
    ),
    mutant(
        "what a source answers too late is forgotten",
        "saf/forwarding/roster.py",
        "            self._found.extend(work)\n\n        left",
        "            if time.monotonic() < now + 1.1:\n                self._found.extend(work)\n\n"
        "        left",
        f"{SLOW}::test_a_loop_forwards_from_a_source_whose_every_look_takes_longer_than_it_waits",
    ),
    mutant(
        "a renewal that has taken long is the last",
        "saf/forwarding/roster.py",
        "        self._threads.take_results(0)  # who",
        "        # who",
        f"{SLOW}::test_a_renewal_and_a_wish_to_stop_that_take_long_are_not_the_last",
    ),
    mutant(
        "a job that has not begun does not hear of a wish to stop",
        FORWARD,
        "if stopped_at and not vigil.heard and now",
        "if False and now",
        f"{FORWARDER}::test_a_stop_before_a_job_has_begun_is_honoured_within_a_lease[run]",
    ),
    mutant(
        "a start of Spark is waited for, whoever wants to stop",
        FORWARD,
        "            if self._stop and not stopped:",
        "            if False:",
        f"{FORWARDER}::test_a_stop_before_a_job_has_begun_is_honoured_within_a_lease[start]",
    ),
    mutant(
        "a purge by a forwarder fails without a word",
        "saf/forwarding/purging.py",
        'log.warning("not_purged"',
        'log.debug("not_purged"',
        f"{PURGING}::test_a_purge_that_fails_is_said_and_stops_nothing",
    ),
    mutant(
        "a forwarder that is no purger warns of it each minute",
        "saf/operating/maintenance.py",
        "raise MayNotPurge(",
        "raise RuntimeError(",
        "integration/test_granted.py::test_a_forwarder_that_is_no_purger_does_not_purge_and_warns_of_nothing",
    ),
    mutant(
        "items of work share a task",
        "saf/spark/runner.py",
        "parallelize([*map(pickle.dumps, work)], len(work))",
        "parallelize([*map(pickle.dumps, work)], max(1, len(work) - 1))",
        "spark/test_fleet.py::test_each_item_of_work_is_a_task_of_its_own",
    ),
    mutant(
        "what goes into a plan of Spark Connect is not sealed",
        "saf/spark/remote.py",
        "Fernet(self.key).encrypt(pickle.dumps(value))",
        "pickle.dumps(value)",
        "spark/test_connect.py::test_a_plan_that_the_server_writes_to_its_log_holds_no_password",
    ),
    mutant(
        "a batch is closed though its task has not come to its end",
        FORWARD,
        "            if receipt.complete:\n                complete",
        "            if receipt:\n                complete",
        f"{FORWARDER}::test_a_drain_goes_on_while_a_task_has_left_some_of_its_work",
    ),
    mutant(
        "what is parked is not reported",
        FORWARD,
        "            self.summary.parked += receipt.parked\n",
        "",
        f"{FORWARDER}::test_what_became_of_messages_is_reported_by_number",
    ),
    mutant(
        "what became a dead letter is not reported",
        FORWARD,
        "            self.summary.dead += receipt.dead\n",
        "",
        f"{FORWARDER}::test_what_became_of_messages_is_reported_by_number",
    ),
    mutant(
        "an error of a task is not reported",
        FORWARD,
        "                self._note(name, receipt.error_kind, receipt.error)\n",
        "                pass\n",
        f"{FORWARDER}::test_what_a_task_met_is_a_problem_and_decides_the_exit_code",
    ),
    mutant(
        "lanes that wait are not reported",
        FORWARD,
        "            self._note_waiting()\n            if not self._stop:",
        "            if not self._stop:",
        f"{FORWARDER}::test_what_became_of_messages_is_reported_by_number",
    ),
    mutant(
        "a forgotten member does not come back at once",
        BROKER,
        "                self._member = None\n                self._balance(connection)",
        "                self._member = None\n                return",
        f"{OWNERS}::test_a_forgotten_forwarder_comes_back_as_a_new_member_at_once",
    ),
    mutant(
        "a forwarder's lease is renewed at its end",
        BROKER,
        "> self.lease_seconds / 3",
        "> self.lease_seconds",
        f"{OWNERS}::test_a_forwarder_renews_its_lease_well_before_it_is_over",
    ),
    mutant(
        "a brief visit finds nothing in a broker that is not healthy",
        BROKER,
        "            self._refuse_unhealthy(connection)\n            subscription_id = "
        "self._identify(connection)\n            found",
        "            subscription_id = self._identify(connection)\n            found",
        f"{FORWARDER}::test_a_brief_visit_refuses_a_broker_whose_cursors_mean_nothing",
        f"{FORWARDER}::test_a_brief_visit_refuses_a_source_whose_own_rows_are_gone",
        f"{FORWARDER}::test_a_brief_visit_refuses_a_source_that_was_moved_since_the_last_one",
    ),
    mutant(
        "nobody hears of what a killed run has marked",
        BROKER,
        "begun = [batch for batch in in_hand if batch.position]",
        "begun = [batch for batch in in_hand if batch.position < 0]",
        f"{FORWARDER}::test_a_run_says_what_an_earlier_one_has_marked_and_may_have_told_nobody",
    ),
    mutant(
        "a batch in hand is not taken up again",
        BROKER,
        "batch in [*owned.in_hand, *opened]",
        "batch in opened",
        f"{FORWARDER}::test_a_brief_visit_finds_what_an_earlier_run_has_left_in_hand",
    ),
    mutant(
        "a restored source is forwarded",
        BROKER,
        "        health.refuse(connection, LOG, reader",
        "        health.require_rows(connection, reader",
        "contract/test_rebase.py::"
        "test_a_dump_is_refused_also_where_transaction_ids_have_got_farther_than_its_own",
    ),
    mutant(
        "a brief visit leaves what is in hand",
        BROKER,
        "                any(taken for _, _, taken in found)\n                or ",
        "                ",
        f"{FORWARDER}::test_a_brief_visit_finds_what_an_earlier_run_has_left_in_hand",
    ),
    mutant(
        "a brief visit leaves lanes whose time has come",
        BROKER,
        "                or backoff.any_due(connection, subscription_id)\n",
        "",
        f"{FORWARDER}::test_a_brief_visit_finds_lanes_whose_time_has_come",
    ),
    mutant(
        "a source that leaves keeps its session",
        BROKER,
        "            connection.close()\n\n    def forget_connection",
        "            pass\n\n    def forget_connection",
        f"{FORWARDER}::test_who_has_nothing_to_do_in_a_brief_visit_ends_with_its_session",
    ),
    mutant(
        "a source's reader shows the password",
        "saf/engine/source.py",
        "dsn.redact(str(error))) from None",
        "str(error)) from None",
        "contract/test_watermarks.py::"
        "test_what_a_source_says_to_its_reader_is_shown_without_the_password",
    ),
    mutant(
        "a limit of connections leaves no room for the driver's own",
        PLAN,
        "(max_connections - PER_DRIVER) // PER_TASK",
        "max_connections // PER_TASK",
        "unit/test_doctests.py",
    ),
    mutant(
        "who was left out has to wait again",
        PLAN,
        "return (size, since) if cap is None else (since, size)",
        "return (size, since)",
        PLANNED,
    ),
    mutant(
        "deep backlogs start first",
        PLAN,
        "        in_turns.sort(key=lambda task: task.much)\n",
        "        in_turns.sort(key=lambda task: not task.much)\n",
        PLANNED,
    ),
    mutant(
        "a limit of tasks is passed",
        PLAN,
        "    return tasks[:limit]",
        "    return tasks",
        PLANNED,
    ),
    mutant(
        "a shard is in no task",
        "saf/log/cursor.py",
        "self.epochs[part::parts]",
        "self.epochs[part + 1 :: parts]",
        PLANNED,
    ),
    mutant(
        "the second half of what was rejected in part is not stored",
        SORTING,
        "for cut in ((0, half), (half,))",
        "for cut in ((0, half),)",
        REJECTED,
    ),
    mutant(
        "neighbours of an unknown service wait with it",
        STORING,
        "return [rest] if rest.rows.num_rows else []",
        "return []",
        UNKNOWN,
    ),
    mutant(
        "a destination is asked to store nothing, of no lane",
        STORING,
        "if not part.rows.num_rows and (once or not part.main):",
        "if False:",
        "contract/test_hostile_in_lanes.py::"
        "test_what_is_retried_and_still_too_large_is_dead_again_while_its_destination_is_down",
    ),
    mutant(
        "two names of one broker share its watermark",
        "saf/engine/destination_sessions.py",
        "if known == identity:",
        "if known is identity and other == name:",
        f"{FORWARDER}::test_a_destination_under_two_names_is_refused",
    ),
    mutant(
        "new messages overtake those that wait for a route",
        SORTING,
        "    rows = _behind(rows, {lane for lane in held if lane.unrouted})\n",
        "",
        "contract/test_set_aside_once.py::"
        "test_a_new_message_does_not_overtake_what_waits_for_a_route_that_has_come",
    ),
    mutant(
        "a problem that a person has to mend is to be tried again",
        SUMMARY,
        '        codes = {getattr(errors, problem["kind"]).exit_code for problem in self.problems}',
        "        codes = {75 for _ in self.problems}",
        SUMMED,
    ),
    mutant(
        "a destination that is down is nothing to try again",
        SUMMARY,
        "Unavailable.exit_code if codes or self.down else 0",
        "Unavailable.exit_code if codes else 0",
        SUMMED,
    ),
    mutant(
        "a rejection is to be tried again",
        SUMMARY,
        "for code in (SafError.exit_code, UsageError.exit_code)",
        "for code in (UsageError.exit_code,)",
        SUMMED,
    ),
    mutant(
        "a sum leaves out what was dropped",
        SUMMARY,
        "        self.dropped += cycle.dropped\n",
        "",
        SUMMED,
    ),
    mutant(
        "what was stored before its service went is parked for it",
        "saf/destinations/postgresql/inbox.py",
        "of_services(where, unknown, rows, known",
        "of_services(where, unknown, chunk.rows, known",
        "contract/test_lanes_in_order.py::"
        "test_what_was_stored_before_its_service_went_is_not_parked_for_it",
    ),
    mutant(
        "messages that wait for a service count as delivered",
        STORING,
        "        rest = part.but(refused.rows)\n",
        "        self.context.receipts.delivered(part.destination, refused.rows)\n"
        "        rest = part.but(refused.rows)\n",
        COUNTED,
    ),
    mutant(
        "every service that a sender can think of is counted by name",
        "saf/engine/work.py",
        "service in counts or len(counts) < MOST_SERVICES",
        "service",
        COUNTED,
    ),
    mutant(
        "chunks are larger than they may be",
        "saf/engine/source.py",
        "batch.slice(start, max_rows - rows)",
        "batch.slice(start, max_rows)",
        "unit/test_chunks.py",
    ),
    mutant(
        "the last chunk is lost",
        "saf/engine/source.py",
        "    if held:\n        yield pa",
        "    if held and rows >= max_rows:\n        yield pa",
        "unit/test_chunks.py",
    ),
    mutant(
        "what is kept grows with every connection",
        "saf/database/connections.py",
        "if before is None and len(_kept) > _most:",
        "if before is None and len(_kept) > MOST + 1000:",
        "contract/test_connections.py::test_those_that_were_used_last_are_kept",
    ),
    mutant(
        "what is kept of a database that no fleet lists stays open",
        "saf/forwarding/roster.py",
        "                self._left(broker.dsn)\n",
        "",
        "contract/test_dropped_databases.py"
        "::test_a_database_that_no_fleet_lists_any_more_can_be_dropped_without_force",
    ),
    mutant(
        "a reader that was left in the middle is kept",
        "saf/engine/source.py",
        "            connections.drop(connection)\n            raise\n",
        '            connections.put(keep, "read", dsn, connection)\n            raise\n',
        "contract/test_connections.py::test_a_reader_that_was_left_in_the_middle_is_not_kept",
    ),
    mutant(
        "each task makes a survey of its own",
        "saf/engine/source.py",
        "    if work.survey is not None:\n",
        "    if work.survey is not None and False:\n",
        f"{SURVEYS}::test_a_batch_is_surveyed_once_however_many_tasks_share_it",
        "spark/test_surveys_on_spark.py::test_four_tasks_read_each_page_five_times",
    ),
    mutant(
        "a survey is used in another snapshot than its own",
        "saf/engine/survey.py",
        "    cursor.execute(adoption.as_string(None))\n",
        "",
        f"{SURVEYS}::test_rows_that_move_after_the_survey_are_read_once",
    ),
    harmless(
        "a task does not lock the log before it adopts a snapshot",
        "saf/engine/survey.py",
        "    cursor.execute(lock.as_string(None))\n",
        "",
        "only if the session of the survey ended, and VACUUM FULL or a purge came, between this "
        "statement and the next query, which locks the log too",
    ),
    mutant(
        "a survey is of one task's shards only",
        "saf/forwarding/surveys.py",
        "[whole for whole in join_splits(splits) if whole not in splits]",
        "[one for one in splits[:1] if join_splits(splits) != splits]",
        f"{SURVEYS}::test_tasks_read_with_a_shared_survey_what_they_read_with_their_own",
    ),
    mutant(
        "the session of a survey outlives its job",
        "saf/forwarding/surveys.py",
        "            job.add_done_callback(_end)\n",
        "            job.add_done_callback(repr)\n",
        f"{SURVEYS}::test_no_session_is_left_when_the_work_fails",
    ),
    mutant(
        "a slow survey holds up other sources",
        "saf/forwarding/surveys.py",
        "PATIENCE_SECONDS if len(jobs) == 1 else OTHERS_SECONDS",
        "PATIENCE_SECONDS",
        f"{SURVEYS}::test_a_source_that_takes_long_to_survey_holds_up_no_other",
    ),
    mutant(
        "in Spark, a task does nothing",
        "saf/spark/runner.py",
        "        for handed in partition:\n",
        "        for handed in list(partition)[:0]:\n",
        "spark/test_forward.py::test_a_second_run_has_nothing_to_do",
    ),
    mutant(
        "a user without a name is left to the login of Hadoop",
        "saf/spark/session.py",
        "    log_in(pinned.jvm(SparkContext))\n",
        "",
        f"{SESSION}::test_a_user_without_a_name_on_a_host_whose_name_does_not_resolve_starts_a_session",
    ),
    mutant(
        "a host whose name does not resolve is looked up by Spark",
        "saf/spark/session.py",
        "        **address(conf, local=local),\n",
        "",
        f"{SESSION}::test_a_user_without_a_name_on_a_host_whose_name_does_not_resolve_starts_a_session",
    ),
]
