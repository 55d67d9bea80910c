"""Pauses and limits: what operators stop or slow down, and what goes on meanwhile."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

RECEIVE, RETRIES = "saf/receiving/receive.py", "saf/receiving/retries.py"
CONDITION, SERVICES = "saf/receiving/dispatch/condition.py", "saf/broker/services.py"
PAUSES = "contract/test_pauses.py"

ALLOTMENT, RATES, LIMITS = (
    "saf/receiving/allotment.py",
    "saf/log/rates.py",
    "contract/test_limits.py",
)
BACKOFF, CONTEXT = "saf/setaside/backoff.py", "saf/engine/context.py"
RELEASING, TASK = "saf/engine/releasing.py", "saf/engine/task.py"
DESTINATIONS = "contract/test_paused_destinations.py"

GROWTH, WORKER, POOLS = (
    "saf/receiving/growth.py",
    "saf/cli/worker.py",
    "contract/test_growth.py",
)

STORING, SPEEDS = "saf/engine/storing.py", "contract/test_destination_rates.py"
TASKS = "contract/test_destination_concurrency.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a destination's rate is not kept",
        STORING,
        "if not messages or settings.rate is None:",
        "if messages:",
        f"{SPEEDS}::test_the_only_destination_gets_its_messages_at_its_rate_and_in_order",
    ),
    mutant(
        "little work passes by a destination's rate",
        "saf/engine/little.py",
        "if destination is None or destination.is_limited:",
        "if destination is None or destination.concurrency is not None:",
        "contract/test_little.py::test_a_destination_with_a_rate_gets_little_work_by_a_task_too",
    ),
    mutant(
        "a slow destination makes others wait until it has everything",
        CONTEXT,
        "too_long = not patient and spent + share.wait_seconds > SPEND_SECONDS",
        "too_long = False",
        f"{SPEEDS}::test_a_slow_destination_delays_no_other_and_gets_all_in_order",
    ),
    mutant(
        "a task that waits for permits does not hear of a pause",
        CONTEXT,
        " and not self.paused(destination):",
        ":",
        f"{SPEEDS}::test_a_pause_ends_the_wait_for_permits",
    ),
    mutant(
        "a destination's concurrency is not kept",
        STORING,
        "if not context.has_seat(name, patient=patient, must=once):",
        "if context.used_up.get(name):",
        f"{TASKS}::test_the_only_destination_gets_its_messages_once_a_seat_is_free",
    ),
    mutant(
        "little work ignores a destination's concurrency",
        "saf/engine/little.py",
        "if destination is None or destination.is_limited:",
        "if destination is None or destination.rate is not None:",
        "contract/test_little.py::"
        "test_a_destination_with_a_concurrency_gets_little_work_by_a_task_too",
    ),
    mutant(
        "a task keeps its seat after it has stored",
        CONTEXT,
        "            self.source.free_seat()\n",
        "",
        f"{TASKS}::test_a_task_frees_its_seat_and_restores_its_session",
    ),
    mutant(
        "a task that has lost its session continues without a seat",
        "saf/engine/source_session.py",
        "if self._seat is not None and self._seat.session is source:",
        "if self._seat is not None:",
        f"{TASKS}::test_a_lost_session_loses_the_seat",
    ),
    mutant(
        "a process that hangs keeps its seat",
        "saf/engine/seats.py",
        "       set_config('idle_session_timeout', %(idle)s, false)\nFROM",
        "       set_config('idle_session_timeout', '1h', false), %(idle)s\nFROM",
        f"{TASKS}::test_a_process_that_hangs_loses_its_seat",
    ),
    mutant(
        "messages for other destinations wait until a seat is free",
        CONTEXT,
        "self._waited[destination] >= SPEND_SECONDS",
        "self._waited[destination] >= 15 * SPEND_SECONDS",
        f"{TASKS}::test_other_destinations_wait_only_briefly_and_order_stays",
    ),
    mutant(
        "a pool grows without a bound",
        GROWTH,
        "min(self.wanted + 1, self._most)",
        "self.wanted + 1",
        f"{POOLS}::test_a_pool_stays_within_its_bounds_however_long_all_are_busy",
    ),
    mutant(
        "a pool grows at the first busy second of all",
        GROWTH,
        "self._busy = self._busy + 1 if max(idle) <= BUSY_SHARE else 0",
        "self._busy = self._busy + 1",
        f"{POOLS}::test_growth_waits_for_readers_that_are_busy_in_a_row",
    ),
    mutant(
        "a pool never shrinks",
        GROWTH,
        "if sum(idle) >= SPARE_READERS else 0",
        "if sum(idle) < 0 else 0",
        f"{POOLS}::test_a_pool_grows_while_all_are_busy_and_shrinks_when_they_are_not",
    ),
    mutant(
        "a process that has not reported counts as busy",
        WORKER,
        "self._reports.get(number, (1.0, 0.0))",
        "self._reports.get(number, (0.0, time.monotonic()))",
        f"{POOLS}::test_who_has_not_reported_is_not_busy",
    ),
    mutant(
        "a worker that waits for permits counts as busy",
        RECEIVE,
        "                if not may_take:\n                    with self.idle():\n",
        "                if not may_take:\n                    with nullcontext():\n",
        f"{POOLS}::test_a_paused_or_limited_worker_is_idle",
    ),
    mutant(
        "a process that is not needed is forgotten, and not ended",
        WORKER,
        "                child.terminate()\n                self._ending.append(child)",
        "                self._ending.append(child)",
        f"{POOLS}::test_a_pool_grows_while_all_are_busy_and_shrinks_when_they_are_not",
    ),
    mutant(
        "each process keeps the rate by itself",
        RATES,
        "SET next_free_at = {_FREE} + make_interval",
        "SET next_free_at = a.next_free_at + 0 * make_interval",
        f"{LIMITS}::test_six_processes_of_which_two_are_killed_keep_the_rate",
    ),
    mutant(
        "a receiver does not wait for its permits",
        ALLOTMENT,
        "if stopping.wait(share.wait_seconds):",
        "if stopping.is_set():",
        f"{LIMITS}::test_a_quiet_time_saves_little",
    ),
    mutant(
        "permits that were not used are lost",
        ALLOTMENT,
        "        if permits and self._rate is not None:",
        "        if permits and self._rate is None:",
        f"{LIMITS}::test_a_receiver_that_finds_nothing_gives_all_its_permits_back",
    ),
    mutant(
        "a delivery has more messages than permits",
        ALLOTMENT,
        "else min(messages, self._permits)",
        "else messages",
        f"{LIMITS}::test_a_delivery_has_no_more_messages_than_permits",
    ),
    mutant(
        "after the clock was set back, receivers wait for the old time",
        RATES,
        "WHEN a.next_free_at > clock_timestamp() + make_interval(secs => %(farthest)s)",
        "WHEN a.next_free_at > clock_timestamp() + interval '10000 years'",
        f"{LIMITS}::test_a_clock_that_was_set_back_stops_nobody",
    ),
    mutant(
        "a quiet hour's permits are all saved",
        RATES,
        "greatest(a.next_free_at, clock_timestamp() - make_interval(secs => %(saved)s))",
        "a.next_free_at",
        f"{LIMITS}::test_a_quiet_time_saves_little",
    ),
    mutant(
        "permits may be reserved any time ahead",
        RATES,
        "WHERE {_FREE} <= clock_timestamp() + make_interval(secs => %(ahead)s)",
        "WHERE true",
        f"{LIMITS}::test_a_killed_process_takes_no_more_than_a_share_with_it",
    ),
    mutant(
        "deliveries lock no seat",
        ALLOTMENT,
        "ORDER BY seat LIMIT 1 FOR UPDATE SKIP LOCKED",
        "ORDER BY seat LIMIT 1",
        f"{LIMITS}::test_no_more_deliveries_are_handled_at_a_time_than_the_limit",
    ),
    mutant(
        "there are as many seats as there ever were",
        ALLOTMENT,
        "AND seat <= %(concurrency)s",
        "AND seat <= %(concurrency)s + 9",
        f"{LIMITS}::test_a_concurrency_that_is_lowered_holds",
    ),
    mutant(
        "a changed rate is not heard of",
        ALLOTMENT,
        "        if rate != self._text:",
        "        if self._text is None:",
        f"{LIMITS}::test_a_limit_that_changes_is_obeyed_at_once",
    ),
    mutant(
        "what was taken at an old rate delays a new one",
        SERVICES,
        "            if after.rate != before.rate:\n"
        "                connection.execute(ANEW, params)\n",
        "",
        f"{LIMITS}::test_a_limit_that_changes_is_obeyed_at_once",
    ),
    mutant(
        "an attempt at a message that failed needs no permit",
        RECEIVE,
        "                self._allotment.used(len(delivery))\n",
        "",
        f"{LIMITS}::test_each_attempt_at_a_message_that_fails_needs_a_permit",
    ),
    mutant(
        "a task does not hear of a pause",
        TASK,
        "return self.context.paused(part.destination) or obstacle(",
        "return obstacle(",
        f"{DESTINATIONS}::test_a_pause_reaches_a_task_at_work",
    ),
    mutant(
        "a task that delivers what was parked does not hear of a pause",
        RELEASING,
        "if tried and (paused or used_up or self.parked.over):",
        "if tried and (used_up or self.parked.over):",
        f"{DESTINATIONS}::test_a_pause_reaches_a_task_that_delivers_what_was_parked",
    ),
    mutant(
        "retried messages go to a paused destination",
        RELEASING,
        "        if paused := self.context.paused(destination):\n"
        "            return dict.fromkeys(lanes, paused)\n",
        "",
        f"{DESTINATIONS}::test_a_retry_is_no_way_into_a_paused_destination",
    ),
    mutant(
        "a lane that a pause keeps from being tried counts an attempt",
        BACKOFF,
        "(NOT paused)::int",
        "1",
        f"{DESTINATIONS}::test_a_retry_is_no_way_into_a_paused_destination",
    ),
    mutant(
        "lanes that a pause kept from being tried stay blocked after it",
        BACKOFF,
        "(paused_at IS NOT NULL OR next_attempt_at = '{BLOCKED}' AND attempts = 0)",
        "paused_at IS NOT NULL",
        f"{DESTINATIONS}::test_a_retry_is_no_way_into_a_paused_destination",
    ),
    mutant(
        "the end of a pause lifts the brake of a lane, too",
        BACKOFF,
        "next_attempt_at = '{BLOCKED}' AND attempts = 0)",
        "next_attempt_at = '{BLOCKED}')",
        f"{DESTINATIONS}::test_other_lanes_that_only_an_operator_releases_stay",
    ),
    mutant(
        "a success in flight ends a pause",
        BACKOFF,
        "AND ({THE_LANE}) IN ({THESE}) AND paused_at IS NULL\n"
        "  AND EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE})",
        "AND ({THE_LANE}) IN ({THESE})\n  AND EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE})",
        f"{DESTINATIONS}::test_a_pause_reaches_a_task_that_delivers_what_was_parked",
    ),
    mutant(
        "retry-now ends a pause",
        "saf/setaside/waiting.py",
        "AND paused_at IS NULL AND NOT awaits_handler",
        "AND NOT awaits_handler",
        f"{DESTINATIONS}::test_a_retry_is_no_way_into_a_paused_destination",
    ),
    mutant(
        "a paused receiver takes messages all the same",
        RECEIVE,
        "may_take = not self.paused and not self._allotment.lacks_permits",
        "may_take = not self._allotment.lacks_permits",
        f"{PAUSES}::test_a_receiver_that_begins_in_a_pause_takes_nothing",
    ),
    mutant(
        "a paused receiver tries messages that failed before",
        RECEIVE,
        "return troubled and not found.paused",
        "return troubled",
        f"{PAUSES}::test_a_message_that_failed_is_not_tried_in_a_pause",
    ),
    mutant(
        "a receiver that reads ahead learns of a pause only at its end",
        RECEIVE,
        "looks = not self._source.goes_on or time.monotonic() >= self._look_at",
        "looks = not self._source.goes_on",
        f"{PAUSES}::test_a_busy_receiver_that_reads_ahead_stops_soon",
    ),
    mutant(
        "a receiver asks often while it is paused, as if it had just found something",
        RECEIVE,
        "more = (more and is_free) or self._allotment.lacks_permits",
        "more = more or self._allotment.lacks_permits",
        f"{PAUSES}::test_a_busy_receiver_that_reads_ahead_stops_soon",
    ),
    mutant(
        "the pause of any subscription pauses all",
        RETRIES,
        "SELECT found.troubled, s.paused_at IS NOT NULL, ",
        "SELECT found.troubled, (SELECT max(paused_at) FROM saf.subscription) IS NOT NULL, ",
        f"{PAUSES}::test_other_subscriptions_of_the_service_go_on",
    ),
    mutant(
        "dispatchers send while their service is paused",
        CONDITION,
        "b.paused_at IS NOT NULL OR s.paused_at IS NOT NULL",
        "b.paused_at IS NOT NULL",
        f"{PAUSES}::test_a_dispatcher_sends_nothing_while_its_service_is_paused",
    ),
    mutant(
        "a second pause replaces who paused first, and why",
        SERVICES,
        "WHERE subscription_id = %(subscription_id)s AND paused_at IS NULL",
        "WHERE subscription_id = %(subscription_id)s",
        f"{PAUSES}::test_a_pause_is_recorded_with_who_and_why_and_shown",
    ),
    mutant(
        "a drain does not say that its subscription is paused",
        "saf/receiving/loop.py",
        "self.summary.held_up = receiver.held_up",
        "self.summary.held_up = False",
        f"{PAUSES}::test_a_drain_says_that_its_subscription_is_paused",
    ),
]
