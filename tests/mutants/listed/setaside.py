"""What is set aside: lanes, dead letters, what a chunk writes beside its position."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

PARKING, BACKOFF, WAITING = (
    "saf/setaside/parking.py",
    "saf/setaside/backoff.py",
    "saf/setaside/waiting.py",
)
SELECTION, DECIDE = "saf/setaside/selection.py", "saf/operating/decide.py"
ASIDE, RELEASING = "saf/engine/set_aside.py", "saf/engine/releasing.py"
ONCE, ISOLATED, LETTERS = (
    "contract/test_set_aside_once.py",
    "contract/test_7_isolated.py",
    "contract/test_dead_letters.py",
)
CRASH = "contract/test_set_aside_crash.py"
SET_BACK, DECIDED = "contract/test_set_back.py", "contract/test_decide_parked.py"
SCHEDULE = (
    f"{ISOLATED}::test_attempts_follow_service_brokers_schedule_over_restarts_and_success_resets_it"
)

GROUPED = "contract/test_failure_groups.py"

MUTANTS: list[Mutant] = [
    mutant(
        "what was sent at least once and waits for its service since looks like a set-back",
        "saf/engine/acknowledged.py",
        "OR (m.again AND p.kind = ANY (%(moved)s))",
        "OR (false AND m.again AND p.kind = ANY (%(moved)s))",
        "contract/test_lanes_in_order.py"
        "::test_what_was_stored_at_least_once_may_wait_for_its_service_since",
    ),
    mutant(
        "a mark of once only is explained by messages of other lanes",
        "saf/engine/acknowledged.py",
        "place.startswith(AGAIN) and lanes[place]",
        "lanes[place]",
        "contract/test_lanes_in_order.py"
        "::test_what_waits_for_its_service_does_not_explain_a_mark_of_exactly_once",
    ),
    mutant(
        "a value that is cut inside its quotes stays in the fingerprint",
        "saf/setaside/fingerprint.py",
        "(?:[^']|'[A-Za-z0-9_])*(?:'|\\Z)",
        "(?:[^']|'[A-Za-z0-9_])*'",
        "unit/test_fingerprints.py::test_what_is_quoted_is_not_in_the_fingerprint",
    ),
    mutant(
        "a decision about a group concerns all dead letters",
        SELECTION,
        '  AND {DEAD_GROUP}"""\n',
        '"""\n',
        f"{GROUPED}::test_a_decision_about_a_group_concerns_its_messages_alone",
    ),
    mutant(
        "a decision about a group reads all other dead letters again for each chunk",
        DECIDE,
        "            chosen = replace(chosen, beyond=held.last)\n",
        "            pass\n",
        f"{GROUPED}::test_a_decision_does_not_read_again_what_it_has_passed",
    ),
    mutant(
        "the exporter names every group, and its series grow with the causes",
        "saf/operating/figures.py",
        "        if (of := (group.subscription, group.reason)) not in named:\n",
        "        if (of := (group.subscription, group.reason)):\n",
        f"{GROUPED}::test_metrics_name_the_largest_group_of_each_subscription_and_reason_alone",
    ),
    mutant(
        "a decision from the dashboard concerns messages that it has not grouped",
        "saf/ui/pages/set_aside.py",
        '            beyond=number_of(visit.given("beyond")),\n',
        "",
        "ui/test_ui_groups.py::"
        "test_of_a_large_backlog_the_page_says_what_it_has_grouped_and_decides_about_that",
    ),
    mutant(
        "what a person took out of a lane is not remembered",
        "saf/operating/decide.py",
        "            in_hand.note(connection, self._parked_ids)\n",
        "            pass\n",
        f"{DECIDED}::test_a_decision_about_what_has_arrived_is_not_taken_for_a_set_back",
    ),
    mutant(
        "a person gives up what another one has let a member take",
        "saf/operating/decide.py",
        "self._rows = self._held(connection, rows)",
        "self._rows = rows",
        f"{DECIDED}::test_a_key_that_a_person_makes_due_is_a_members_and_no_other_persons",
    ),
    mutant(
        "a number of one broker is looked for in all of them",
        "saf/cli/brokers.py",
        "        if numbers and len(self.brokers) > 1:",
        "        if False:",
        "integration/test_set_aside.py::"
        "test_a_number_of_one_broker_alone_needs_no_broker_where_nothing_can_be_lost",
    ),
    mutant(
        "a number of one broker is decided about in all of them",
        "saf/cli/decisions.py",
        "    if len(round_.brokers) <= 1:\n        return round_\n",
        "    return round_\n",
        "integration/test_set_aside.py::"
        "test_what_a_number_names_is_decided_about_in_one_broker_only",
    ),
    mutant(
        "a decision that cannot be undone takes the broker that alone has the number",
        "saf/cli/decisions.py",
        "if alone and len(having) == 1 and not round_.failed:",
        "if len(having) == 1 and not round_.failed:",
        "integration/test_set_aside.py::"
        "test_what_a_number_names_is_decided_about_in_one_broker_only",
    ),
    mutant(
        "a number is retried at the first of the brokers that have it",
        "saf/cli/decisions.py",
        "if alone and len(having) == 1 and not round_.failed:",
        "if alone and having and not round_.failed:\n        having = having[:1]",
        "integration/test_set_aside.py::test_a_number_that_several_brokers_know_is_retried_at_none",
    ),
    mutant(
        "a decision that is interrupted goes on to its end",
        "saf/cli/brokers.py",
        "            stopping.set()\n",
        "",
        "integration/test_set_aside.py::"
        "test_a_decision_that_is_interrupted_ends_with_its_step_and_says_what_is_done",
    ),
    mutant(
        "Ctrl-C waits for what a database has in hand",
        "saf/cli/brokers.py",
        "{name: partial(one, name) for name in self.brokers}",
        "{name: __import__('concurrent.futures').futures.ThreadPoolExecutor(1)"
        ".submit(one, name).result for name in self.brokers}",
        "contract/test_replay.py::test_ctrl_c_ends_a_replay_that_waits_for_another_one",
    ),
    mutant(
        "a destination that was set back and cannot be read back stays refused for ever",
        "saf/operating/repair/send_again.py",
        "            blind = stuck if since is not None else []",
        "            blind: list[str] = []",
        "contract/test_https.py::test_one_that_was_set_back_gets_all_again_that_was_sent_since_a_time_"
        "that_a_person_says",
    ),
    mutant(
        "what a destination may have lost, and nobody knows, is not sent again",
        "saf/operating/repair/send_again.py",
        'if entry.state == "complete":',
        'if entry.state == "pending":',
        "contract/test_https.py::test_one_that_was_set_back_gets_all_again_that_was_sent_since_a_time_"
        "that_a_person_says",
    ),
    mutant(
        "a replay of a range lets a store go on that was set back",
        "saf/operating/repair/send_again.py",
        "            if behind and until is not None:",
        "            if False:",
        f"{SET_BACK}::test_a_replay_of_a_range_does_not_let_a_store_go_on_that_was_set_back",
    ),
    mutant(
        "what has expired goes to a destination that did not say whether it has it",
        "saf/engine/storing.py",
        "                if isinstance(answer.error, REFUSES):\n"
        "                    self._wait(part, set_aside, answer)\n",
        "",
        "contract/test_expired_in_lanes.py::"
        "test_what_has_expired_waits_while_its_destination_does_not_say_whether_it_has_it",
    ),
    mutant(
        "what is sent again does not say for which service it has no route",
        "saf/engine/parked_lanes.py",
        "obstacle(left.get(lane, lane))",
        "obstacle(lane)",
        "contract/test_lanes_in_order.py::"
        "test_what_is_retried_says_for_which_service_it_has_no_way",
    ),
    mutant(
        "the problem of a router is not told of what is sent again",
        "saf/engine/parked_lanes.py",
        "(resolution.waiting, routed.filter(pc.invert(routable)))",
        "(None, routed.filter(pc.invert(routable)))",
        "contract/test_lanes_in_order.py::"
        "test_what_is_retried_says_for_which_service_it_has_no_way",
    ),
    mutant(
        "parked messages go although a replay before them has failed",
        RELEASING,
        "        return {main}\n",
        "        return set()\n",
        "contract/test_lanes_in_order.py::test_what_is_parked_goes_after_a_replay_that_has_failed",
    ),
    mutant(
        "what is sent again is taken for failed while the open batch has not passed it",
        "saf/engine/releasing.py",
        "            if lane.due:\n",
        "            if False:\n",
        "contract/test_jsonl.py::"
        "test_messages_behind_a_replay_that_became_due_meanwhile_do_not_count_as_failed",
    ),
    mutant(
        "what a person has parked again forgets the quality of its route",
        RELEASING,
        "pc.coalesce(qualities, by_route, pa.scalar(default))",
        "pc.coalesce(qualities, pa.scalar(default))",
        "contract/test_quality_in_lanes.py",
    ),
    mutant(
        "a source does not note that messages are set aside",
        ASIDE,
        "        self._noted = note_set_aside(source, self.work.batch.of(shards))",
        "        pass",
        f"{SET_BACK}::test_a_set_back_that_only_what_was_set_aside_since_shows_is_noticed",
    ),
    mutant(
        "a source remembers only its last time of setting aside",
        "saf/destinations/marks.py",
        "time is None or time in known:",
        "time is None or time in known[-1:]:",
        f"{CRASH}::test_what_is_set_aside_after_an_answer_got_lost_is_not_taken_for_a_set_back",
    ),
    mutant(
        "a mark of a lane does not show that messages were set aside",
        "saf/destinations/places.py",
        "    return moved | noting(chunk, {**marks, **moved})",
        "    new = noting(chunk, {**marks, **moved})\n"
        "    return moved | {place: new[place] for place in moved.keys() & new.keys()}",
        f"{SET_BACK}::test_a_set_back_that_only_a_dead_letter_shows_which_was_parked_at_the_backup"
        "_is_noticed",
    ),
    mutant(
        "a repair does not remember what destinations know of messages that were set aside",
        "saf/operating/repair/rebase.py",
        "AS at UNION SELECT unnest(m.times)",
        "AS at",
        f"{SET_BACK}::test_a_set_back_that_only_what_was_set_aside_since_shows_is_noticed",
    ),
    mutant(
        "a repeated task does not learn what its first run has set aside",
        "saf/engine/task.py",
        "                if not self.closes:",
        "                if False:",
        f"{ONCE}::test_a_task_that_is_run_again_knows_what_was_set_aside_before",
    ),
    mutant(
        "a task does not learn what a parallel task has set aside",
        "saf/engine/destination_sessions.py",
        "            if not marks:",
        "            if not marks and (raised := error):\n"
        "                raise raised\n"
        "            elif not marks:",
        f"{ONCE}::test_a_task_knows_what_its_twin_has_set_aside_meanwhile",
    ),
    mutant(
        "a source does not note messages that operators take out of lanes",
        "saf/log/cursor.py",
        "    if shards:\n        connection.execute(DURABLY)",
        "    if not shards:\n        connection.execute(DURABLY)",
        f"{SET_BACK}::test_a_set_back_is_noticed_that_only_shows_in_what_a_person_decided_about_parked_messages",
    ),
    mutant(
        "a forwarder does not learn operators' decisions about a lane",
        "saf/engine/source_session.py",
        "        learn_set_aside(connection, self._work.batch)",
        "        learn_set_aside",
        f"{SET_BACK}::test_a_set_back_is_noticed_that_only_shows_in_what_a_person_decided_about_parked_messages",
    ),
    mutant(
        "a person who is stopped in a decision holds cursors for as long as it lasts",
        "saf/log/cursor.py",
        "        connection.execute(IDLE_NO_LONGER)\n",
        "",
        f"{DECIDED}::test_a_person_who_is_stopped_in_a_decision_holds_forwarders_up_no_longer_than_they_wait",
    ),
    mutant(
        "who buries what has expired waits for a decision about it",
        "saf/setaside/dropped.py",
        " FOR UPDATE SKIP LOCKED",
        "",
        f"{DECIDED}::test_a_forwarder_buries_what_has_expired_without_a_route_and_waits_for_no_decision",
    ),
    mutant(
        "setting aside with a position is not durable",
        "saf/log/cursor.py",
        """connection.execute(DURABLY)
    return dict(_write(connection, NOTE_SET_ASIDE""",
        """connection.execute(DURABLY[:-2] + "off")
    return dict(_write(connection, NOTE_SET_ASIDE""",
        f"{CRASH}::test_what_is_set_aside_is_durable_before_a_later_chunk_passes_it",
    ),
    mutant(
        "a page of lanes begins with the one that the page before has ended with",
        WAITING,
        "            > ({",
        "            >= ({",
        "integration/test_pages_of_lists.py::test_page_after_page_shows_everything_once",
    ),
    mutant(
        "a page of lanes goes on at more attempts than a database counts",
        WAITING,
        "Field(ge=-(1 << 31), le=0)",
        "Field(le=0)",
        "integration/test_pages_of_lists.py::test_what_no_page_ends_with_is_refused",
    ),
    mutant(
        "the last page of a list says that there is another one",
        "saf/database/queries.py",
        "more = len(found) > limit",
        "more = len(found) >= limit",
        "integration/test_pages_of_lists.py::test_a_page_says_the_command_that_goes_on",
    ),
    mutant(
        "an attempt that was not due counts",
        BACKOFF,
        "AND (b.next_attempt_at <= now()",
        "AND (b.next_attempt_at IS NOT NULL",
        f"{ONCE}::test_an_attempt_that_was_not_due_does_not_count",
    ),
    mutant(
        "the waits are twice as long",
        PARKING,
        "min(attempts - 1, 30)",
        "min(attempts, 30)",
        "unit/test_doctests.py",
        SCHEDULE,
    ),
    mutant(
        "an attempt is not counted",
        BACKOFF,
        "ELSE b.attempts + 1 END",
        "ELSE b.attempts END",
        SCHEDULE,
    ),
    mutant(
        "what is to be tried now is made due for one destination at most",
        WAITING,
        "AND (%(destination)s::text IS NULL OR destination = %(destination)s)",
        "AND destination = %(destination)s",
        "integration/test_set_aside.py::test_parked_lists_the_lanes_and_retry_now_makes_them_due",
    ),
    mutant(
        "what is written ahead is parked twice",
        ASIDE,
        'rows += [row for row in dicts if row["message_id"] not in here]',
        "rows += dicts",
        f"{ONCE}::"
        "test_what_is_written_ahead_of_a_watermark_is_parked_once_although_the_answer_got_lost",
    ),
    mutant(
        "what is too large is not written ahead of the watermark",
        ASIDE,
        "return bool(self.parked or self.dead or self.unread)",
        "return bool(self.parked or self.dead)",
        f"{ONCE}::test_a_message_too_large_to_read_is_set_aside_before_a_watermark_passes_it",
    ),
    mutant(
        "what is parked is not written ahead of the watermark",
        ASIDE,
        "return bool(self.parked or self.dead or self.unread)",
        "return bool(self.dead or self.unread)",
        f"{CRASH}::test_a_service_made_known_after_a_crash_gets_what_was_about_to_be_parked",
    ),
    mutant(
        "what expires does so by the clock of the task",
        ASIDE,
        "now = pa.scalar(self.work.batch.opened_at, expiry.type)",
        "import datetime\n"
        "        now = pa.scalar(datetime.datetime.now(datetime.UTC), expiry.type)",
        f"{ONCE}::test_what_had_not_expired_when_its_batch_was_opened_is_delivered_however_late",
    ),
    mutant(
        "what expires at this moment lives on",
        ASIDE,
        "pc.less_equal(expiry, now)",
        "pc.less(expiry, pc.subtract(now, 10**9))",
        f"{ISOLATED}::test_an_expired_message_becomes_a_dead_letter",
    ),
    mutant(
        "dead letters of the same chunk die in any order",
        ASIDE,
        'dead.bury(source, sorted(new, key=itemgetter("id")), at)',
        'dead.bury(source, sorted(new, key=itemgetter("id"), reverse=True), at)',
        "contract/test_routers.py::"
        "test_dead_letters_of_several_reasons_die_in_the_order_in_which_they_were_sent",
    ),
    mutant(
        "a dead letter that is retried is still one",
        DECIDE,
        "for statement in (DUE_OF_DEAD, PARK_DEAD, DELETE):",
        "for statement in (DUE_OF_DEAD, PARK_DEAD):",
        f"{LETTERS}::test_retrying_again_retries_nothing_and_what_is_rejected_again_is_dead_again",
    ),
    mutant(
        "what is retried expires again",
        DECIDE,
        '"NULL" if c == "expires_at" else f"d.{c}"',
        'f"d.{c}"',
        f"{LETTERS}::test_what_had_expired_is_delivered_all_the_same_when_a_person_retries_it",
    ),
    mutant(
        "what is retried keeps no order",
        DECIDE,
        "row_number() OVER (ORDER BY dead_letter_id)",
        "row_number() OVER (ORDER BY dead_letter_id DESC)",
        f"{LETTERS}::test_retried_messages_arrive_in_order_and_with_their_ids",
    ),
    mutant(
        "retries take no turn",
        DECIDE,
        "                connection.execute(ONE_AT_A_TIME)\n",
        "                pass\n",
        f"{LETTERS}::test_retries_are_numbered_one_at_a_time",
    ),
    mutant(
        "a filter by reason chooses all",
        SELECTION,
        "AND (%(reason)s::text IS NULL OR reason = %(reason)s)",
        "AND (%(reason)s::text IS NULL OR reason IS NOT NULL)",
        f"{LETTERS}::test_a_filter_chooses_and_a_discarded_message_is_gone_and_remembered",
    ),
    mutant(
        "what is discarded is not remembered",
        DECIDE,
        """number = audit(
                    connection,
                    str(self),
                    held.message_ids,
                    why,
                    person=person,
                    names=held.names,
                )""",
        "number = passes_on and audit(connection, str(self), held.message_ids, why, person=person)",
        f"{LETTERS}::test_a_filter_chooses_and_a_discarded_message_is_gone_and_remembered",
    ),
    mutant(
        "a key goes on waiting though its dead letter was discarded",
        DECIDE,
        "monologs.GIVE_UP, LET_KEYS_OF_DEAD_GO_ON, DELETE",
        "monologs.GIVE_UP, DELETE",
        "contract/test_worker.py::"
        "test_a_key_stays_blocked_by_its_dead_letter_if_so_configured_until_it_is_decided",
    ),
    mutant(
        "what a chunk sets aside is written without asking for the position",
        "saf/engine/task.py",
        "before = lock_cursors(source, batch) if set_aside else position",
        "before = 0 if set_aside else position",
        "crash/test_transforms_checked.py::test_an_answer_that_gets_lost_counts_nothing_twice",
    ),
    mutant(
        "what is parked commits without the position",
        "saf/engine/task.py",
        "            set_aside.write(source, before)\n",
        "            other = type(self.context.source)(self.context.work, 1)\n"
        "            other(lambda source: set_aside.write(source, before))\n",
        f"{ONCE}::test_what_is_parked_commits_with_the_position_that_passes_it",
    ),
    mutant(
        "messages that wait count as attempted",
        "saf/engine/task.py",
        """        if not parts:
            return parts
        set_aside.write_ahead(source)
""",
        """        if parts:
            set_aside.write_ahead(source)
""",
        f"{ONCE}::"
        "test_at_most_once_messages_that_wait_are_not_attempted_and_so_are_not_lost_by_a_crash",
    ),
    mutant(
        "what may have left waits for its destination, and is sent again",
        "saf/engine/task.py",
        "        parts = self.earlier.unattempted(parts, before, set_aside)\n",
        "",
        "contract/test_at_most_once_in_doubt.py::test_what_may_have_left_does_not_wait_to_be_sent_again",
    ),
    mutant(
        "what a twin tries at most once is tried by both",
        "saf/engine/task.py",
        "        return self.earlier.unattempted(parts, before, set_aside)\n",
        "        return parts\n",
        f"{ONCE}::test_what_a_twin_tries_at_most_once_meanwhile_is_not_sent_by_both",
    ),
    mutant(
        "what a person has decided about is set aside again by a task that lags behind",
        "saf/engine/set_aside.py",
        "        if before >= self.position:\n            return\n",
        "",
        f"{ONCE}::test_a_task_that_lags_behind_its_twin_sets_nothing_aside_again",
    ),
    mutant(
        "a person decides about a dead letter that its batch is not past",
        DECIDE,
        "SELECT dead_letter_id, message_id, s.log, s.name {{chosen}} AND ({{stays}}) IS NULL",
        "SELECT dead_letter_id, message_id, s.log, s.name {{chosen}}",
        f"{LETTERS}::test_what_an_open_batch_is_not_past_stays_and_says_why",
    ),
    mutant(
        "the only destination's messages are parked one by one",
        "saf/engine/task.py",
        "        self._stay_open(set_aside)\n",
        "",
        f"{ISOLATED}::test_the_only_destination_down_leaves_the_batch_open_until_its_time",
    ),
    mutant(
        "what was set aside before a crash is sent as well",
        "saf/engine/task.py",
        "                self.earlier.find_set_aside()\n",
        "",
        f"{ONCE}::test_what_is_a_dead_letter_already_is_not_delivered_as_well_after_a_crash",
    ),
    mutant(
        "a message leaves its lane after it was sent at most once",
        RELEASING,
        "        self._doubt(part)\n",
        "",
        f"{ONCE}::test_a_parked_message_leaves_its_lane_before_it_is_sent_at_most_once",
    ),
    mutant(
        "a zombie takes messages out of a lane",
        "saf/engine/parked_lanes.py",
        "            lock_cursors(source, self.context.work.batch)\n"
        "            gone = set_aside.write_from_lanes(",
        "            gone = set_aside.write_from_lanes(",
        f"{ONCE}::test_a_zombie_takes_nothing_out_of_a_lane",
    ),
    mutant(
        "a zombie leads messages to their routes",
        "saf/engine/parked_lanes.py",
        """            lock_cursors(source, self.context.work.batch)
            parking.touch(source, subscription_id, lanes, "has""",
        """            parking.touch(source, subscription_id, lanes, "has""",
        f"{ONCE}::test_a_zombie_leads_nothing_to_a_route_that_has_come",
    ),
    mutant(
        "what expires in a lane is dead although its destination has stored it",
        "saf/engine/storing.py",
        "            expired = answer\n",
        "            pass\n",
        "contract/test_expired_in_lanes.py::"
        "test_what_is_stored_already_is_not_dead_because_its_answer_got_lost",
    ),
    mutant(
        "a service that is called like another one at a broker has that one's marks",
        "saf/destinations/marks.py",
        'f"{name}@" if addressable',
        "name if addressable",
        "contract/test_lane_names.py::test_no_two_lanes_have_the_same_name",
    ),
]
