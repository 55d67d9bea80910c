"""Bugs that somebody planted who had not written the code, and that the tests let through then.

`OF_THEIR_KIND` has more of the same kinds in other places, which nothing had noticed either: an
epoch, a lock or a condition that is missing, a bound that is inclusive or not, what belongs to
another shard, lane, destination, service, batch or subscription.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

MARKING, RELEASING = "saf/receiving/dispatch/marking.py", "saf/engine/releasing.py"
CURSOR, SHARDS = "saf/log/cursor.py", "saf/log/shards.py"
HELD_LANES, THE_HELD = "saf/engine/context.py", "unit/test_held_lanes.py"
DISPATCH, ONCE = "contract/test_dispatch.py", "contract/test_set_aside_once.py"
OWNERS = "contract/test_owners.py"

SURVIVORS: list[Mutant] = [
    mutant(
        "a webhook from the future is good until then",
        "saf/signing/webhook.py",
        "if abs(difference) > tolerance_seconds:",
        "if difference > tolerance_seconds:",
        "unit/test_webhook_signatures.py::test_a_webhook_of_the_past_or_of_the_future_is_refused",
    ),
    mutant(
        "an event that was known by its source is stored again",
        "saf/webhooks/receiver.py",
        "WHERE lives AND NOT EXISTS (SELECT FROM saf.webhook WHERE digest = %(digest)s)",
        "WHERE lives",
        "contract/test_webhook_inbox.py::"
        "test_an_event_that_was_known_by_its_source_is_known_where_ids_are_the_signed_ones_since",
    ),
    mutant(
        "reserved addresses are public",
        "saf/receiving/dispatch/transport.py",
        '"203.0.113.0/24", "240.0.0.0/4"',
        '"203.0.113.0/24"',
        "unit/test_public_addresses.py::test_an_address_that_is_reserved_is_not_public",
    ),
    mutant(
        "a dispatcher's marks do not name the epoch",
        MARKING,
        "AND c.owner = %(owner)s AND c.epoch = m.epoch\nRETURNING",
        "AND c.owner = %(owner)s\nRETURNING",
        f"{DISPATCH}::test_marks_of_a_shard_that_went_and_came_back_write_nothing",
    ),
    mutant(
        "ids that were complete in the batch before are kept",
        "saf/receiving/ahead.py",
        "ids = CASE WHEN d.batch = excluded.batch THEN d.ids + excluded.ids ELSE excluded.ids END",
        "ids = (d.ids + excluded.ids)",
        f"{DISPATCH}::test_ids_that_are_complete_are_of_one_batch_and_beyond_its_position",
    ),
    mutant(
        "a task that was taken over notes that it sends at most once",
        RELEASING,
        """        def doubt(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, batch)
""",
        """        def doubt(source: psycopg.Connection[Any]) -> None:
""",
        "contract/test_at_most_once_in_doubt.py::"
        "test_a_zombie_sends_nothing_of_a_lane_that_the_new_owner_has_read",
    ),
    mutant(
        "a replay that has found a route expires",
        RELEASING,
        "SENT_AGAIN = (Kind.REPLAY, Kind.FOUND_REPLAY)",
        "SENT_AGAIN = (Kind.REPLAY,)",
        "contract/test_expired_in_lanes.py::"
        "test_what_is_sent_again_is_sent_although_it_has_expired_since",
    ),
    mutant(
        "a replay does not hold its destination's own lane",
        HELD_LANES,
        """        if lane.kind == Kind.REPLAY:
            self.held[Lane(destination=lane.destination)] = why
""",
        "",
        f"{THE_HELD}::test_a_replay_holds_the_destinations_own_lane_and_no_other_destinations",
    ),
    mutant(
        "a lane opens that the batch itself has filled",
        HELD_LANES,
        """        if lane in self.ahead:
            return
""",
        "",
        f"{THE_HELD}::test_a_lane_that_the_batch_itself_has_filled_stays_held",
    ),
    mutant(
        "a chunk that has opened a lane is done in part",
        "saf/engine/set_aside.py",
        "if self.dead or self.unread or self._left_out or self.opened:",
        "if self.dead or self.unread or self._left_out:",
        f"{THE_HELD}::"
        "test_a_chunk_that_has_opened_a_lane_is_not_done_up_to_its_first_message_that_waits",
    ),
    mutant(
        "a clock that goes back gives a time of setting aside twice",
        CURSOR,
        """greatest(
    now(), c.opened_at, c.set_aside_at[cardinality(c.set_aside_at)] + interval '1 microsecond'
)""",
        "now()",
        f"{ONCE}::test_a_clock_that_goes_back_gives_each_time_of_setting_aside_a_value_of_its_own",
    ),
    mutant(
        "a person locks cursors in any order",
        CURSOR,
        "ORDER BY shard FOR UPDATE) AS locked",
        "ORDER BY shard) AS locked",
        f"{ONCE}::test_a_person_waits_for_the_first_cursor_before_any_other_is_locked",
    ),
    mutant(
        "a session in another database keeps a member alive",
        SHARDS,
        "      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())\n",
        "",
        f"{OWNERS}::test_a_member_is_not_kept_alive_by_its_session_in_another_database",
    ),
    mutant(
        "a lease has its full term after a silence",
        SHARDS,
        '"lease_seconds": self.lease_seconds - silent_seconds}',
        '"lease_seconds": self.lease_seconds}',
        f"{OWNERS}::test_a_lease_lasts_its_term_from_when_the_member_was_last_heard_of",
    ),
    mutant(
        "what is left of a transaction that the position lies in is not counted",
        "saf/log/backlog.py",
        "THEN first.txid ELSE h.begun END",
        "THEN h.begun ELSE h.begun END",
        "contract/test_backlog.py::"
        "test_of_a_transaction_that_the_position_lies_in_the_rest_is_left",
    ),
    mutant(
        "of a large transaction, what was read is all that is left",
        "saf/log/backlog.py",
        "            _add(backlog, row, rest[one] / counts[one])\n",
        "            _add(backlog, row, row.left)\n",
        "contract/test_backlog.py::"
        "test_of_a_transaction_that_went_on_at_the_last_batch_the_rest_is_left",
    ),
    mutant(
        "a large transaction is complete up to a position that does not count for it",
        "saf/log/backlog.py",
        "if self.open is None or txid in begun_since(self.open)[1]:",
        "if self.open is None and txid:",
        "contract/test_backlog.py::"
        "test_a_transaction_that_the_open_batch_does_not_have_is_left_wherever_the_position_is",
    ),
    mutant(
        "the message at the position is left",
        "saf/log/backlog.py",
        "AND (id <= position OR id <@ beyond)",
        "AND (id < position OR id <@ beyond)",
        "contract/test_backlog.py::"
        "test_the_message_at_the_position_is_not_left_where_an_older_transaction_wrote_after_it",
    ),
    mutant(
        "a checkpoint may lack what was committed of its batch",
        "saf/log/stream.py",
        "given.open and given.open == own.open and given.position < own.position",
        "given.open and given.open == own.open and given.position < 0",
        "unit/test_checkpoints.py::test_a_checkpoint_that_lacks_what_was_committed_is_refused",
    ),
    mutant(
        "a count that somebody else has made is taken back",
        "saf/receiving/retries.py",
        'WHERE {THIS_LANE} AND attempts = %(attempts)s\n"""\n\nWAIT',
        'WHERE {THIS_LANE} AND %(attempts)s IS NOT NULL\n"""\n\nWAIT',
        "contract/test_worker.py::"
        "test_a_count_is_taken_back_only_if_nobody_has_counted_another_attempt_since",
    ),
    mutant(
        "a message that has failed counts as behind itself",
        "saf/receiving/delivery.py",
        "return place > self._stopped.get(message.lane, place)\n\n    def _place",
        "return place >= self._stopped.get(message.lane, place + 1)\n\n    def _place",
        "contract/test_stopping.py::"
        "test_a_message_that_failed_before_the_stop_is_parked_though_earlier_ones_are_put_back",
    ),
    mutant(
        "a value at a bound of a histogram counts as above it",
        "saf/telemetry/metrics.py",
        "from bisect import bisect_left\n",
        "from bisect import bisect_right as bisect_left\n",
        "unit/test_doctests.py::test_the_examples_in_the_docstrings_are_true[saf.telemetry.metrics]",
    ),
    mutant(
        "the default destination gets a topic's messages beside others",
        "saf/routing/matching.py",
        "if not (route.fallback and by_destination):",
        "if True:",
        "unit/test_matching.py::test_the_default_destination_is_in_no_topics_match_beside_others",
    ),
    mutant(
        "a source with all its memories knows only the times since the last",
        "saf/destinations/marks.py",
        "return len(known) < TIMES or time > known[0]",
        "return len(known) < TIMES or time > known[-1]",
        "unit/test_doctests.py::"
        "test_the_examples_in_the_docstrings_are_true[saf.destinations.marks]",
    ),
]

WINDOW, OF_WINDOW = "saf/receiving/dispatch/window.py", "unit/test_window.py"
MARKS, PLACES = "saf/destinations/marks.py", "saf/destinations/places.py"
COMPARED = "unit/test_marks_compared.py"
EARLIER, OF_EARLIER = "saf/engine/task.py", "unit/test_earlier_task.py"
ENTRANCES, RECEIVER = "unit/test_entrances.py", "saf/webhooks/receiver.py"
WEBHOOK, SIGNATURES = "saf/signing/webhook.py", "unit/test_webhook_signatures.py"
GUARD, ADDRESSES = "saf/receiving/dispatch/transport.py", "unit/test_public_addresses.py"
STREAM, CHECKPOINTS = "saf/log/stream.py", "unit/test_checkpoints.py"

OF_THEIR_KIND: list[Mutant] = [
    mutant(
        "a shard that went and came back keeps what is in memory",
        WINDOW,
        "if shard not in now or now[shard].epoch != hand.epoch",
        "if shard not in now",
        f"{OF_WINDOW}::test_a_shard_that_went_and_came_back_is_read_anew",
    ),
    mutant(
        "a shard that stays forgets how far it is",
        WINDOW,
        "self.shards.setdefault(shard, hand)",
        "self.shards[shard] = hand",
        f"{OF_WINDOW}::test_a_shard_that_stays_keeps_what_is_in_memory",
    ),
    mutant(
        "a shard may go before its answers are marked",
        WINDOW,
        """ | {
            hand.shard for hand in self.shards.values() if hand.touched
        }""",
        "",
        f"{OF_WINDOW}::test_no_shard_is_let_go_before_its_answers_are_marked",
    ),
    mutant(
        "messages of a shard that leaves are sent",
        WINDOW,
        "            if lane.shard in self.leaving:\n",
        "            if False:\n",
        f"{OF_WINDOW}::test_of_shards_that_leave_nothing_more_is_sent",
    ),
    mutant(
        "messages of a shard that leaves could be sent",
        WINDOW,
        "return any(lane.shard not in self.leaving for lane in self._ready)",
        "return bool(self._ready)",
        f"{OF_WINDOW}::test_of_shards_that_leave_nothing_more_is_sent",
    ),
    mutant(
        "a key has a second turn while a message of it is in flight",
        WINDOW,
        "        if not lane.in_flight:\n            self._ready",
        "        if True:\n            self._ready",
        f"{OF_WINDOW}::"
        "test_while_a_later_message_of_a_key_is_in_flight_the_key_does_not_get_a_second_turn",
    ),
    mutant(
        "what follows a key that waits is sent before that is written",
        WINDOW,
        "if outcome is None and message.lane in self._stopped:",
        "if outcome is None and message.lane in self._resting:",
        f"{OF_WINDOW}::test_what_follows_a_key_that_waits_parks_behind_it_until_that_is_written",
    ),
    mutant(
        "a key that waited counts as waiting for ever",
        WINDOW,
        "        self._stopped.difference_update(marks.waiting)\n",
        "",
        f"{OF_WINDOW}::test_what_follows_a_key_that_waits_parks_behind_it_until_that_is_written",
    ),
    mutant(
        "a delayed message is read again before its end is written",
        WINDOW,
        "for walk in [*late, *self._new.ended])",
        "for walk in late)",
        f"{OF_WINDOW}::"
        "test_a_message_whose_time_has_come_is_not_read_again_before_its_end_is_written",
    ),
    mutant(
        "delayed messages of another member's shard are taken",
        WINDOW,
        """        if message.shard not in self.shards:
            return
        walk""",
        "        walk",
        f"{OF_WINDOW}::test_a_message_whose_time_has_come_goes_behind_its_key_if_that_waits",
    ),
    mutant(
        "keys of a shard that has gone rest for ever",
        WINDOW,
        "            self._resting.intersection_update(self.lanes)\n",
        "",
        f"{OF_WINDOW}::test_a_key_that_rests_is_not_woken_after_its_shard_has_gone",
    ),
    mutant(
        "messages of a shard that has gone are sent",
        WINDOW,
        "            self._ready = deque(one for one in self._ready if one.shard not in dropped)\n",
        "",
        f"{OF_WINDOW}::test_a_shard_that_went_and_came_back_is_read_anew",
    ),
    mutant(
        "an old mark of the batch in hand is trusted",
        MARKS,
        "mark.batch >= in_hand.batch",
        "mark.batch > in_hand.batch",
        f"{COMPARED}::test_an_old_mark_is_trusted_if_its_batch_is_before_the_one_in_hand",
    ),
    mutant(
        "an old mark of parked messages is compared with the batch in hand",
        MARKS,
        "return lane in (MAIN, AGAIN, ONCE) and mark.batch",
        "return mark.batch",
        f"{COMPARED}::"
        "test_an_old_mark_of_messages_that_were_parked_is_trusted_whatever_its_batch_is",
    ),
    mutant(
        "a mark of a shard that the source does not know is its own",
        MARKS,
        """    if in_hand is None:
        return True
""",
        """    if in_hand is None:
        return False
""",
        f"{COMPARED}::test_a_mark_of_a_shard_that_the_source_does_not_know_is_ahead",
    ),
    mutant(
        "a shard is reached by the newest of its marks",
        MARKS,
        "oldest and opened_at and min(oldest, opened_at)",
        "oldest and opened_at and max(oldest, opened_at)",
        f"{COMPARED}::test_a_shard_is_reached_by_the_oldest_of_its_marks",
    ),
    mutant(
        "a set-back is said to begin where its last place does",
        MARKS,
        "since=min(filter(None, kept), default=None)",
        "since=max(filter(None, kept), default=None)",
        f"{COMPARED}::test_of_all_places_behind_the_earliest_opening_and_the_first_mark_are_said",
    ),
    mutant(
        "the epoch of another shard lets an owner before store",
        PLACES,
        "if epoch > own[shard]]",
        "if epoch > max(own.values())]",
        f"{COMPARED}::test_an_epoch_is_fenced_by_a_newer_one_of_its_shard_alone",
    ),
    mutant(
        "what the source remembers of another lane counts",
        PLACES,
        "for place, mark in chunk.known.items() if place in places}",
        "for place, mark in chunk.known.items()}",
        f"{COMPARED}::test_a_mark_of_another_lane_than_the_chunks_says_nothing_of_it",
    ),
    mutant(
        "a destination's mark of another lane counts",
        PLACES,
        "stored = {place: mark for place, mark in marks.items() if place in places}",
        "stored = dict(marks)",
        f"{COMPARED}::test_a_mark_of_another_lane_than_the_chunks_says_nothing_of_it",
    ),
    mutant(
        "rows of the mark's own batch are all fresh",
        PLACES,
        "(batches > batch) |",
        "(batches >= batch) |",
        f"{COMPARED}::test_rows_at_or_below_a_mark_are_stored",
    ),
    mutant(
        "a mark moves back",
        PLACES,
        "if mark.number <= old.number:",
        "if False:",
        f"{COMPARED}::test_a_mark_moves_to_the_last_row_and_never_back",
    ),
    mutant(
        "an answer to what is sent at most once is waited for",
        PLACES,
        "rows, answered = chunk.rows, chunk.prefix != ONCE",
        "rows, answered = chunk.rows, True",
        f"{COMPARED}::test_a_mark_of_at_most_once_is_not_acknowledged",
    ),
    mutant(
        "what is noted already is noted with each chunk",
        PLACES,
        "mark.set_aside_at < newest",
        "mark.set_aside_at <= newest",
        f"{COMPARED}::"
        "test_the_last_time_of_setting_aside_is_noted_for_the_chunks_shards_if_it_is_newer",
    ),
    mutant(
        "what was set aside of other shards is noted",
        PLACES,
        'for shard in times.keys() & {*pc.unique(chunk.rows["shard"]).to_pylist()}:',
        "for shard in times:",
        f"{COMPARED}::"
        "test_the_last_time_of_setting_aside_is_noted_for_the_chunks_shards_if_it_is_newer",
    ),
    mutant(
        "the last message that was attempted is sent again",
        EARLIER,
        'part.rows["id"].to_numpy() <= limits',
        'part.rows["id"].to_numpy() < limits',
        f"{OF_EARLIER}::test_what_was_attempted_is_told_by_the_id_of_its_own_shard",
    ),
    mutant(
        "what was attempted of another shard counts",
        EARLIER,
        'limits[part.rows["shard"].to_numpy()]',
        "limits.max()",
        f"{OF_EARLIER}::test_what_was_attempted_is_told_by_the_id_of_its_own_shard",
    ),
    mutant(
        "what is set aside for one destination is so for all",
        EARLIER,
        "ids[destination].append(id_)",
        'ids[""].append(id_)',
        f"{OF_EARLIER}::test_what_is_set_aside_for_one_destination_is_fresh_for_others",
    ),
    mutant(
        "a lane that the batch has filled may open",
        EARLIER,
        "                lanes.ahead.add(lane)\n",
        "",
        f"{OF_EARLIER}::test_what_is_set_aside_for_one_destination_is_fresh_for_others",
    ),
    mutant(
        "a topic's message that is set aside once is done",
        EARLIER,
        'pc.or_(copies, pc.invert(pc.is_in(routed["id"], set_aside)))',
        'pc.invert(pc.is_in(routed["id"], set_aside))',
        f"{OF_EARLIER}::test_of_a_topics_message_some_copy_may_be_left",
    ),
    mutant(
        "a body of the largest size is too large",
        "saf/webhooks/asgi.py",
        "if len(body) > most:",
        "if len(body) >= most:",
        f"{ENTRANCES}::test_a_body_has_as_many_bytes_as_are_allowed_and_not_one_more",
    ),
    mutant(
        "a body that says the largest size is too large",
        "saf/webhooks/asgi.py",
        "int(length) > most",
        "int(length) >= most",
        f"{ENTRANCES}::test_a_body_has_as_many_bytes_as_are_allowed_and_not_one_more",
    ),
    mutant(
        "one request more than are taken at a time has a place",
        "saf/webhooks/asgi.py",
        "if self._inside >= self._at_once:",
        "if self._inside > self._at_once:",
        f"{ENTRANCES}::test_as_many_requests_have_a_place_as_are_allowed_and_a_place_is_given_back",
    ),
    mutant(
        "a place is not given back",
        "saf/webhooks/asgi.py",
        "            self._inside -= 1\n",
        "            ...\n",
        f"{ENTRANCES}::test_as_many_requests_have_a_place_as_are_allowed_and_a_place_is_given_back",
    ),
    mutant(
        "a source and an id are known by their letters alone",
        RECEIVER,
        'hashlib.sha256("\\0".join(parts)',
        'hashlib.sha256("".join(parts)',
        f"{ENTRANCES}::test_an_event_is_known_by_its_service_its_source_and_its_id_each_by_itself",
    ),
    mutant(
        "ids of two sources are one message_id",
        RECEIVER,
        'uuid5(EVENTS, f"{one.source}\\0{one.id}")',
        "uuid5(EVENTS, one.id)",
        f"{ENTRANCES}::test_ids_of_two_sources_that_are_no_uuids_are_two_messages",
    ),
    mutant(
        "the first moment after the calendar is in it",
        RECEIVER,
        "if moment >= LAST_DAY:",
        "if moment > LAST_DAY:",
        f"{ENTRANCES}::"
        "test_an_event_of_the_end_of_the_calendar_is_refused_from_its_first_moment_on",
    ),
    mutant(
        "the first moment of the calendar is not in it",
        RECEIVER,
        "return moment if moment >= FIRST_DAY else now",
        "return moment if moment > FIRST_DAY else now",
        f"{ENTRANCES}::test_an_event_of_before_the_calendar_has_happened_now",
    ),
    mutant(
        "a signature of any version counts",
        WEBHOOK,
        'if version == "v1" and len(value) == LENGTH',
        "if len(value) == LENGTH",
        f"{SIGNATURES}::test_only_signatures_of_version_1_count",
    ),
    mutant(
        "signatures are compared until they differ",
        WEBHOOK,
        'if hmac.compare_digest(right, one.encode(errors="replace")):',
        'if right == one.encode(errors="replace"):',
        f"{SIGNATURES}::test_the_time_that_a_comparison_takes_tells_nothing",
    ),
    mutant(
        "the shortest secret is too short",
        WEBHOOK,
        "SHORTEST <= len(key) <= LONGEST",
        "SHORTEST < len(key) <= LONGEST",
        f"{SIGNATURES}::test_the_shortest_and_the_longest_secret_are_taken",
    ),
    mutant(
        "a webhook at the tolerance is too old",
        WEBHOOK,
        "if abs(difference) > tolerance_seconds:",
        "if abs(difference) >= tolerance_seconds:",
        f"{SIGNATURES}::test_a_webhook_holds_within_the_tolerance_on_either_side",
    ),
    mutant(
        "a signature does not cover the id",
        WEBHOOK,
        'f"{message_id}.{timestamp}."',
        'f"{timestamp}."',
        f"{SIGNATURES}::test_a_signature_covers_the_id_the_time_and_the_body",
    ),
    mutant(
        "addresses of many are public",
        GUARD,
        '    "224.0.0.0/4",  # multicast\n',
        "",
        f"{ADDRESSES}::test_an_address_of_many_is_not_public",
    ),
    mutant(
        "an address inside of 6to4 is public",
        GUARD,
        '"64:ff9b::/96": 0, "2002::/16": 80',
        '"64:ff9b::/96": 0',
        f"{ADDRESSES}::test_an_address_that_stands_for_one_inside_is_not_public",
    ),
    mutant(
        "a batch of transactions that the database has not begun is known",
        STREAM,
        "shows_all_of(known.end, given.end) and shows_all_of(known.now, given.end)",
        "shows_all_of(known.end, given.end)",
        f"{CHECKPOINTS}::test_a_batch_of_transactions_that_the_database_has_not_begun_is_refused",
    ),
    mutant(
        "a checkpoint of a later incarnation goes on",
        STREAM,
        "if given.incarnation != own.incarnation:",
        "if given.incarnation < own.incarnation:",
        f"{CHECKPOINTS}::test_a_checkpoint_of_a_database_that_had_more_is_refused",
    ),
    mutant(
        "a lane opens while a replay waits",
        HELD_LANES,
        "if Lane(destination=lane.destination, kind=Kind.REPLAY) not in self.held:",
        "if True:",
        f"{THE_HELD}::test_while_a_replay_waits_no_lane_of_its_destination_opens",
    ),
    mutant(
        "services wait for other destinations too",
        HELD_LANES,
        "lanes = [lane for lane in self.held if lane.destination == destination]",
        "lanes = [lane for lane in self.held]",
        f"{THE_HELD}::test_services_that_wait_are_those_of_one_destination_and_of_their_kind",
    ),
]

MUTANTS = [*SURVIVORS, *OF_THEIR_KIND]
