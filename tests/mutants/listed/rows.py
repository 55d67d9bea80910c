"""Whose rows: of another subscription, destination, shard, lane or opening, or one too many."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

BACKOFF, PARKING, DEAD, SELECTION = (
    "saf/setaside/backoff.py",
    "saf/setaside/parking.py",
    "saf/setaside/dead.py",
    "saf/setaside/selection.py",
)
EXPIRED, MARKS, SHARDS = (
    "saf/setaside/dropped.py",
    "saf/engine/acknowledged.py",
    "saf/log/shards.py",
)
ROWS = "contract/test_whose_rows.py::test_"
LANE = f"{ROWS}a_lane_is_asked_for_made_due_and_forgotten_for_its_own_subscription"
EMPTY = (
    f"{ROWS}a_lane_is_not_empty_while_a_message_of_it_waits_and_those_of_other_lanes_say_nothing"
)
HOLD = f"{ROWS}lanes_hold_messages_up_in_the_shards_and_the_subscription_that_they_are_of"
AGAIN = f"{ROWS}only_a_lane_that_is_due_starts_again_while_something_goes"
HEARS = f"{ROWS}a_member_hears_of_lanes_of_services_that_are_due_in_its_own_shards"
TURN = f"{ROWS}a_lane_had_no_turn_only_if_it_was_due_then_and_has_not_been_tried"
READ = f"{ROWS}lanes_are_read_for_the_batchs_shards_and_without_what_it_has_set_aside_itself"
ASIDE = f"{ROWS}a_batch_has_set_aside_what_is_beyond_its_position_since_it_was_opened"
OCCUPIED = f"{ROWS}lanes_are_occupied_by_their_own_messages_in_the_batchs_shards"
KNOWN = f"{ROWS}what_is_set_aside_is_known_by_subscription_and_destination"
STILL = f"{ROWS}a_message_is_still_there_if_it_is_in_the_lane_that_it_was_read_from"
CHOSEN = f"{ROWS}dead_letters_are_chosen_up_to_a_number_and_before_a_moment"
BURIED = f"{ROWS}what_has_expired_without_a_route_is_buried_for_the_batchs_own_shards"
REMEMBERED = f"{ROWS}a_mark_is_remembered_for_its_own_destination_lane_and_shard"
OF_PARKED = f"{ROWS}a_mark_is_of_parked_messages_of_its_own_lane_shard_and_opening"
MEMBERS = f"{ROWS}members_of_one_subscription_are_nothing_to_another_one"

CONDITION, CONDITIONS = "saf/receiving/dispatch/condition.py", "contract/test_conditions.py::test_"
PROBE = f"{CONDITIONS}a_probe_is_one_members_at_a_time_and_only_of_an_endpoint_that_is_open_and_due"
LONGEST = (
    f"{CONDITIONS}a_failure_is_counted_once_and_an_endpoint_is_disabled_after_its_longest_time"
)
CHOICES, CHOICE = "saf/routing/route_choices.py", "contract/test_route_choices.py::test_"

FACTS, INSTANCES = "saf/dialogs/facts.py", "saf/receiving/processors.py"
OF_KEY, OF_COPY = "unit/test_instances.py::test_", "unit/test_lost_copies.py::test_"
LOST, BLIND = "saf/operating/repair/reconcile/copies.py", "saf/operating/repair/send_again.py"
SET_BACK, BY_ROWS = "saf/operating/repair/set_back.py", "contract/test_set_back_by_rows.py::test_"

CURSOR, OWNERS = "saf/log/cursor.py", "contract/test_owners.py::test_"
RETRIES = "saf/receiving/retries.py"

MINE = "subscription_id = %(subscription_id)s"
HERE = "{SAME_LANE} AND p.shard = ANY ({MY_SHARDS})"
PLACE = "AND p.shard = m.shard AND p.opened_at = m.opened_at)"

MUTANTS: list[Mutant] = [
    mutant(
        "lanes of another subscription are due",
        BACKOFF,
        f'WHERE {MINE} AND next_attempt_at <= now())\n"""\n\nANY_LANE',
        'WHERE next_attempt_at <= now())\n"""\n\nANY_LANE',
        LANE,
    ),
    mutant(
        "lanes of another subscription wait",
        BACKOFF,
        f"SELECT EXISTS (SELECT FROM saf.backoff WHERE {MINE})",
        "SELECT EXISTS (SELECT FROM saf.backoff)",
        LANE,
    ),
    mutant(
        "services of another subscription wait",
        BACKOFF,
        f"SELECT EXISTS (SELECT FROM saf.backoff WHERE {MINE}\n               AND kind",
        "SELECT EXISTS (SELECT FROM saf.backoff\n               WHERE kind",
        HOLD,
    ),
    mutant(
        "lanes are named in any subscription",
        BACKOFF,
        f"{{BACKOFF}} WHERE {MINE} AND ({{THE_LANE}}) IN",
        "{BACKOFF} WHERE ({THE_LANE}) IN",
        LANE,
    ),
    mutant(
        "lanes of all subscriptions are shown",
        BACKOFF,
        f"({{BACKOFF}} WHERE {MINE}) AS backoff",
        "({BACKOFF}) AS backoff",
        LANE,
    ),
    mutant(
        "messages of other shards hold a lane up",
        BACKOFF,
        "WHERE {SAME_LANE} AND p.shard = ANY (%(shards)s))",
        "WHERE {SAME_LANE})",
        HOLD,
    ),
    mutant(
        "lanes of another subscription hold messages up",
        BACKOFF,
        f"error FROM saf.backoff b\nWHERE {MINE}\n  AND (kind, subject, broker)",
        "error FROM saf.backoff b\nWHERE (kind, subject, broker)",
        HOLD,
    ),
    mutant(
        "a lane that is not due starts again",
        BACKOFF,
        '  AND next_attempt_at <= now()\n"""\nFORGET',
        '"""\nFORGET',
        AGAIN,
    ),
    mutant(
        "lanes of another subscription start again",
        BACKOFF,
        f"UPDATE saf.backoff SET attempts = 0\nWHERE {MINE} AND (",
        "UPDATE saf.backoff SET attempts = 0\nWHERE (",
        AGAIN,
    ),
    mutant(
        "lanes of another subscription are forgotten",
        BACKOFF,
        f"DELETE FROM saf.backoff b\nWHERE {MINE} AND (",
        "DELETE FROM saf.backoff b\nWHERE (",
        LANE,
    ),
    mutant(
        "a lane is forgotten whose messages wait",
        BACKOFF,
        '\n  AND NOT EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE})\n"""\n# Messages',
        '\n"""\n# Messages',
        EMPTY,
    ),
    mutant(
        "lanes of another subscription are made due",
        BACKOFF,
        f"needs_operator = false, {{FOR_ALL}}\nWHERE {MINE} AND ({{THE_LANE}})",
        "needs_operator = false, {FOR_ALL}\nWHERE ({THE_LANE})",
        LANE,
    ),
    mutant(
        "a member hears of services whose messages are another one's",
        BACKOFF,
        f"AND (EXISTS (SELECT FROM saf.parked p WHERE {HERE})",
        "AND (EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE})",
        HEARS,
    ),
    mutant(
        "what is due in another member's shards is due here",
        BACKOFF,
        f"b.next_attempt_at <= now()\n      AND EXISTS (SELECT FROM saf.parked p WHERE {HERE}))",
        "b.next_attempt_at <= now()\n"
        "      AND EXISTS (SELECT FROM saf.parked p WHERE {SAME_LANE}))",
        HEARS,
    ),
    mutant(
        "what was due at that moment was not due yet",
        BACKOFF,
        "b.next_attempt_at <= %(since)s",
        "b.next_attempt_at < %(since)s",
        TURN,
    ),
    mutant(
        "what was tried since had no turn",
        BACKOFF,
        "      AND (b.attempts = 0 OR b.next_attempt_at <= %(since)s)\n",
        "",
        TURN,
    ),
    mutant(
        "parked messages of other shards are read",
        PARKING,
        "  AND shard = ANY ({shards}::smallint[])\n  AND (id <=",
        "  AND (id <=",
        READ,
    ),
    mutant(
        "parked messages of another subscription are read",
        PARKING,
        "WHERE subscription_id = {subscription_id} AND destination = {destination}",
        "WHERE destination = {destination}",
        READ,
    ),
    mutant(
        "what was parked at the position is left in its lane",
        PARKING,
        "AND (id <= {after} OR",
        "AND (id < {after} OR",
        READ,
    ),
    mutant(
        "dead letters of another subscription are the batch's",
        PARKING,
        f"WHERE {MINE} AND shard = ANY (%(shards)s::smallint[])\n"
        "  AND id > %(position)s AND dead_letter_at",
        "WHERE shard = ANY (%(shards)s::smallint[])\n  AND id > %(position)s AND dead_letter_at",
        ASIDE,
    ),
    mutant(
        "what is parked at the position is beyond it",
        PARKING,
        "AND id > %(position)s AND opened_at",
        "AND id >= %(position)s AND opened_at",
        ASIDE,
    ),
    mutant(
        "a lane is occupied by messages of other shards",
        PARKING,
        "\n      AND shard = ANY (%(shards)s::smallint[]))",
        ")",
        OCCUPIED,
    ),
    mutant(
        "a lane is occupied by messages of another subscription",
        PARKING,
        f"WHERE {MINE}\n      AND (p.destination",
        "WHERE (p.destination",
        OCCUPIED,
    ),
    mutant(
        "what is parked for another destination is known",
        PARKING,
        f"WHERE {MINE} AND destination = %(destination)s\n  AND (id, message_id)",
        f"WHERE {MINE}\n  AND (id, message_id)",
        KNOWN,
    ),
    mutant(
        "a message is still there if it is at another destination",
        PARKING,
        'WHERE p.destination = %(destination)s\n"""\nUNPARK',
        'WHERE true\n"""\nUNPARK',
        STILL,
    ),
    mutant(
        "a message is still there if it is in another lane",
        PARKING,
        "    USING (parked_id, kind, subject, broker)\n",
        "    USING (parked_id)\n",
        STILL,
    ),
    mutant(
        "a dead letter of another destination is known",
        DEAD,
        f"WHERE {MINE} AND destination = %(destination)s\n  AND (id, message_id)",
        f"WHERE {MINE}\n  AND (id, message_id)",
        KNOWN,
    ),
    mutant(
        "a dead letter as it is stored is one for all destinations",
        DEAD,
        f"WHERE d.{MINE} AND d.destination = %(destination)s\n",
        f"WHERE d.{MINE}\n",
        f"{ROWS}a_dead_letter_of_one_destination_is_none_of_another_one",
    ),
    mutant(
        "a dead letter of that moment is before it",
        SELECTION,
        "{since} < %(before)s",
        "{since} <= %(before)s",
        CHOSEN,
    ),
    mutant(
        "the last dead letter of a choice is left out",
        SELECTION,
        "{number} <= %(through)s",
        "{number} < %(through)s",
        CHOSEN,
    ),
    mutant(
        "a page of dead letters begins with the last one of the page before",
        SELECTION,
        "{number} > %(after)s",
        "{number} >= %(after)s",
        CHOSEN,
    ),
    mutant(
        "what expires as the batch is opened has not expired",
        EXPIRED,
        "AND expires_at <= %(opened_at)s",
        "AND expires_at < %(opened_at)s",
        BURIED,
    ),
    mutant(
        "what has expired at a destination is buried without a question",
        EXPIRED,
        f"WHERE {MINE} AND kind = '{{Kind.ROUTE}}'",
        f"WHERE {MINE}",
        BURIED,
    ),
    mutant(
        "what has expired in other shards is buried",
        EXPIRED,
        " AND shard = ANY (%(shards)s)",
        "",
        BURIED,
    ),
    mutant(
        "what has expired of another subscription is buried",
        EXPIRED,
        f"WHERE {MINE} AND kind",
        "WHERE kind",
        BURIED,
    ),
    mutant(
        "what is taken out without a route is remembered",
        "saf/setaside/in_hand.py",
        " AND destination <> ''",
        "",
        f"{ROWS}what_a_person_takes_out_of_a_forwarders_lanes_is_remembered_and_nothing_else",
    ),
    mutant(
        "the last count of what is dropped is all",
        "saf/setaside/dropped.py",
        "messages = d.messages + excluded.messages",
        "messages = excluded.messages",
        f"{ROWS}what_is_dropped_is_counted_by_subscription_shard_and_reason",
    ),
    mutant(
        "all keys wait for a handler",
        "saf/setaside/unhandled.py",
        "WHERE b.awaits_handler\nGROUP BY",
        "GROUP BY",
        f"{ROWS}what_waits_for_a_handler_is_counted_with_its_own_lanes_messages",
    ),
    mutant(
        "a mark moves at another destination too",
        MARKS,
        "    WHERE a.destination = %(destination)s AND a.lane = m.lane\n",
        "    WHERE a.lane = m.lane\n",
        REMEMBERED,
    ),
    mutant(
        "a mark moves in other lanes too",
        MARKS,
        "    WHERE a.destination = %(destination)s AND a.lane = m.lane\n",
        "    WHERE a.destination = %(destination)s\n",
        REMEMBERED,
    ),
    mutant(
        "a task that lags behind sets a mark back",
        MARKS,
        "\n      AND (a.batch, a.position) <= (m.batch, m.position)",
        "",
        REMEMBERED,
    ),
    mutant(
        "marks of another destination are forgotten",
        MARKS,
        'WHERE a.destination = %(destination)s AND a.lane = m.lane AND a.shard = m.shard\n"""\n\n'
        "LANES",
        'WHERE a.lane = m.lane AND a.shard = m.shard\n"""\n\nLANES',
        REMEMBERED,
    ),
    mutant(
        "a mark is of messages that wait in other shards",
        MARKS,
        PLACE,
        "AND p.opened_at = m.opened_at)",
        OF_PARKED,
    ),
    mutant(
        "a mark is of messages that wait since another opening",
        MARKS,
        PLACE,
        "AND p.shard = m.shard)",
        OF_PARKED,
    ),
    mutant(
        "a mark is of messages that were not taken out",
        MARKS,
        ' OR {_STILL_WAITS.format(table="taken_out")}',
        "",
        OF_PARKED,
    ),
    mutant(
        "members of another subscription are forgotten",
        SHARDS,
        f"m.{MINE} AND m.member_id IS DISTINCT",
        "m.member_id IS DISTINCT",
        MEMBERS,
    ),
    mutant(
        "members of another subscription live here",
        SHARDS,
        f"SELECT name FROM saf.member WHERE {MINE} ORDER BY name",
        "SELECT name FROM saf.member ORDER BY name",
        MEMBERS,
    ),
    mutant(
        "shards with work under way are let go",
        SHARDS,
        " AND shard <> ALL (%(keep)s::smallint[])",
        " AND %(keep)s::smallint[] IS NOT NULL",
        f"{ROWS}a_member_keeps_the_shards_that_it_has_work_in_and_lets_go_no_more_than_it_must",
    ),
    mutant(
        "an endpoint comes up for another subscription",
        CONDITION,
        f'WHERE {MINE} AND state = \'open\' AND {{THERE}}\n"""\nDISABLE',
        'WHERE state = \'open\' AND {THERE}\n"""\nDISABLE',
        f"{CONDITIONS}an_endpoint_that_goes_down_and_comes_up_is_no_other_subscriptions",
    ),
    mutant(
        "to resume an endpoint resumes those of others",
        CONDITION,
        f"paused_by = NULL, changed_at = clock_timestamp()\nWHERE {MINE}\n",
        "paused_by = NULL, changed_at = clock_timestamp()\n",
        f"{CONDITIONS}an_endpoint_that_goes_down_and_comes_up_is_no_other_subscriptions",
    ),
    mutant(
        "two members send a probe",
        CONDITION,
        "  AND next_probe_at <= clock_timestamp() AND {THERE}",
        "  AND {THERE}",
        PROBE,
    ),
    mutant(
        "a probe is sent while an endpoint is paused",
        CONDITION,
        "AND state = 'open' AND paused_at IS NULL\n",
        "AND state = 'open'\n",
        PROBE,
    ),
    mutant(
        "a probe of another subscription is taken",
        CONDITION,
        f"WHERE {MINE} AND state = 'open' AND paused_at",
        "WHERE state = 'open' AND paused_at",
        PROBE,
    ),
    mutant(
        "a failure that another dispatcher has met counts again",
        CONDITION,
        "WHERE b.state = 'closed'\n",
        "",
        LONGEST,
    ),
    mutant(
        "an endpoint that a person has to resume opens again",
        CONDITION,
        f"WHERE {MINE}) AS l\nWHERE {MINE} AND state = 'open' AND",
        f"WHERE {MINE}) AS l\nWHERE {MINE} AND",
        LONGEST,
    ),
    mutant(
        "attempts of other subscriptions are trimmed",
        CONDITION,
        f"DELETE FROM saf.attempt WHERE {MINE} AND attempt_id",
        "DELETE FROM saf.attempt WHERE attempt_id",
        f"{CONDITIONS}the_last_attempts_are_kept_of_each_subscription",
    ),
    mutant(
        "attempts are counted among those of all subscriptions",
        CONDITION,
        f"SELECT attempt_id FROM saf.attempt WHERE {MINE}\n",
        "SELECT attempt_id FROM saf.attempt\n",
        f"{CONDITIONS}the_last_attempts_are_kept_of_each_subscription",
    ),
    mutant(
        "a key has one choice for all brokers",
        CHOICES,
        " AND c.broker IS NOT DISTINCT FROM w.broker",
        "",
        f"{CHOICE}a_choice_is_a_keys_of_one_service_and_one_broker",
    ),
    mutant(
        "a key has one choice for all services",
        CHOICES,
        "c.key = w.key AND c.service = w.service AND",
        "c.key = w.key AND",
        f"{CHOICE}a_choice_is_a_keys_of_one_service_and_one_broker",
    ),
    mutant(
        "a choice is forgotten before unnoted uses are over",
        CHOICES,
        "max(retention_seconds, 2 * NOTED_SECONDS) + NOTED_SECONDS",
        "max(retention_seconds, 2 * NOTED_SECONDS)",
        f"{CHOICE}a_choice_is_forgotten_after_the_retention_and_the_time_in_which_uses_go_unnoted",
    ),
    mutant(
        "a choice is kept for lanes of other destinations",
        CHOICES,
        'lane="b.destination = one.destination"',
        "lane=\"b.destination <> ''\"",
        f"{CHOICE}a_choice_is_kept_for_lanes_of_its_own_destination_and_service",
    ),
    mutant(
        "a choice is kept for lanes of other services",
        CHOICES,
        "WHERE {lane} AND b.subject = one.service)",
        "WHERE {lane})",
        f"{CHOICE}a_choice_is_kept_for_lanes_of_its_own_destination_and_service",
    ),
    mutant(
        "a use that went unnoted before a batch was opened does not count",
        CHOICES,
        "\n                    - make_interval(secs => %(noted)s)",
        " + make_interval(secs => %(noted)s * 0)",
        f"{CHOICE}a_choice_is_kept_while_a_batch_is_in_hand_that_was_opened_before",
    ),
    mutant(
        "a message that is ahead by one is taken for the next",
        FACTS,
        "message.sequence > facts.receive_sequence + 1:",
        "message.sequence > facts.receive_sequence + 2:",
        "unit/test_facts.py::test_only_the_next_number_is_taken",
    ),
    mutant(
        "a timer rings in a dialog that has failed",
        FACTS,
        "if facts.timer != message.message_id or facts.error_code is not None:",
        "if facts.timer != message.message_id:",
        "unit/test_facts.py::test_a_timer_rings_once_and_only_the_last_one_that_was_set",
    ),
    mutant(
        "a code is as large as no column takes",
        FACTS,
        "if not -(2**31) <= code < 2**31:",
        "if not -(2**31) <= code <= 2**31:",
        "unit/test_facts.py::test_a_code_that_no_column_takes_is_a_violation",
    ),
    mutant(
        "each message that no router resolves fails its dialog again",
        FACTS,
        "if is_repeat or facts.error_code",
        "if facts.error_code",
        "unit/test_facts.py::test_an_error_to_oneself_is_taken_if_nothing_else_has_failed_before",
    ),
    mutant(
        "what comes after the lifetime is not counted as received",
        FACTS,
        "        return Verdict.DROP, received\n",
        "        return Verdict.DROP, facts\n",
        "unit/test_facts.py::test_an_end_that_has_ended_here_or_is_over_counts_what_it_drops",
    ),
    mutant(
        "an instance of another epoch goes on",
        INSTANCES,
        "if instance is None or instance.epoch != epoch:",
        "if instance is None:",
        f"{OF_KEY}an_instance_is_that_of_its_key_as_long_as_the_epoch_is_the_same",
    ),
    mutant(
        "an instance is thrown away in the place of another one of its key",
        INSTANCES,
        "            if self._by_lane.get(instance.lane) is instance:\n                del",
        "            if instance.lane in self._by_lane:\n                del",
        f"{OF_KEY}an_instance_that_was_replaced_is_not_thrown_away_with_the_old_one",
    ),
    mutant(
        "an instance that was replaced takes its turn",
        INSTANCES,
        "            if self._by_lane.get(instance.lane) is instance:\n                found",
        "            if instance.lane in self._by_lane:\n                found",
        f"{OF_KEY}a_turn_is_of_instances_that_are_live_still_and_of_as_many_as_are_asked_for",
    ),
    mutant(
        "an instance that was used at that moment was not used since",
        INSTANCES,
        "if instance.used_at >= moment]",
        "if instance.used_at > moment]",
        f"{OF_KEY}an_instance_that_was_used_at_a_moment_was_used_since_it",
    ),
    mutant(
        "one instance more goes than are too many",
        INSTANCES,
        "(len(found) >= too_many and",
        "(len(found) > too_many and",
        f"{OF_KEY}the_least_recently_used_go_first_and_no_more_than_there_are_too_many",
    ),
    mutant(
        "an instance stays the least recently used",
        INSTANCES,
        "        self._by_lane.move_to_end(lane)\n",
        "",
        f"{OF_KEY}the_least_recently_used_go_first_and_no_more_than_there_are_too_many",
    ),
    mutant(
        "what was lost in another shard is lost in all",
        LOST,
        "return sent.shard in self.shards and not (",
        "return not (",
        f"{OF_COPY}a_copy_is_lost_where_the_destination_is_set_back_in_the_messages_shard",
    ),
    mutant(
        "what was given up as the lower mark was opened is not lost",
        LOST,
        "given_up < opened_at)",
        "given_up <= opened_at)",
        f"{OF_COPY}what_was_given_up_before_the_lower_mark_was_opened_is_not_lost",
    ),
    mutant(
        "the first message of a topic came before it began",
        LOST,
        "sent.created_at >= begun",
        "sent.created_at > begun",
        f"{OF_COPY}a_destination_had_what_was_created_since_it_began_to_get_the_topic",
    ),
    mutant(
        "routes count for the moment in which they were replaced",
        LOST,
        "sent.created_at < until",
        "sent.created_at <= until",
        f"{OF_COPY}routes_that_were_replaced_before_a_message_was_created_say_nothing_of_it",
    ),
    mutant(
        "what waits for a route has been stored",
        LOST,
        'if not others & {name, ""} and',
        "if not others & {name} and",
        f"{OF_COPY}a_copy_is_lost_where_the_destination_is_set_back_in_the_messages_shard",
    ),
    mutant(
        "what is set aside of another message holds a copy back",
        BLIND,
        'if other.state == "set_aside" and (other.shard, other.id) == (entry.shard, entry.id)',
        'if other.state == "set_aside"',
        f"{OF_COPY}a_copy_goes_again_to_destinations_for_which_it_is_not_set_aside",
    ),
    mutant(
        "what waits for a route goes again",
        BLIND,
        'elif "" not in held:',
        "else:",
        f"{OF_COPY}a_copy_goes_again_to_destinations_for_which_it_is_not_set_aside",
    ),
    mutant(
        "the only destination of what is set aside may have got it",
        BLIND,
        "if len(ways) < 2 or not lacking:",
        "if not lacking:",
        f"{OF_COPY}the_only_destination_has_not_got_what_is_set_aside",
    ),
    mutant(
        "what is pending goes again",
        BLIND,
        'if entry.state not in ("complete", "aside") or not',
        'if entry.state not in ("complete", "aside", "pending") or not',
        f"{OF_COPY}a_message_that_is_complete_goes_again_and_one_that_is_pending_does_not",
    ),
    mutant(
        "a source remembers its oldest mark of a place",
        SET_BACK,
        "WHERE destination = %(destination)s ORDER BY lane, shard, batch DESC",
        "WHERE destination = %(destination)s ORDER BY lane, shard, batch",
        f"{BY_ROWS}a_source_remembers_the_newest_mark_of_each_place_of_this_destination",
    ),
    mutant(
        "a source remembers marks of other destinations",
        SET_BACK,
        "FROM saf.acknowledged WHERE destination = %(destination)s ORDER BY",
        "FROM saf.acknowledged WHERE %(destination)s::uuid IS NOT NULL ORDER BY",
        f"{BY_ROWS}a_source_remembers_the_newest_mark_of_each_place_of_this_destination",
    ),
    mutant(
        "what receivers have in hand is the forwarder's",
        SET_BACK,
        "WHERE s.log = 'outbox' AND s.name = 'forwarder' ORDER BY",
        "ORDER BY",
        f"{BY_ROWS}a_source_has_in_hand_what_its_forwarder_has_and_not_what_others_read",
    ),
    mutant(
        "an epoch that the source has given says that it was set back",
        SET_BACK,
        "if epoch > after.epochs.get(s, epoch)}",
        "if epoch >= after.epochs.get(s, epoch)}",
        f"{BY_ROWS}an_epoch_that_the_source_has_not_given_says_that_it_was_set_back",
    ),
    mutant(
        "what was acknowledged meanwhile is behind",
        SET_BACK,
        "differ = compare(known.marks, before.marks, after.in_hand)",
        "differ = compare(known.marks, after.marks, after.in_hand)",
        f"{BY_ROWS}what_was_acknowledged_while_the_destination_was_asked_is_not_behind",
    ),
    mutant(
        "a repair does not ask what was set aside",
        SET_BACK,
        "if shard in after.in_hand and after.in_hand[shard].has_forgotten(mark)",
        "if False",
        f"{BY_ROWS}a_time_of_setting_aside_that_the_source_does_not_know_says_that_it_was_set_back",
    ),
    mutant(
        "what was attempted is read without a lock",
        CURSOR,
        "SELECT c.shard, c.attempted FROM saf.cursor c, {MINE} FOR UPDATE OF c",
        "SELECT c.shard, c.attempted FROM saf.cursor c, {MINE}",
        f"{OWNERS}of_two_that_attempt_at_the_same_time_only_one_hears_that_nobody_has_before",
    ),
    mutant(
        "cursors are not locked",
        CURSOR,
        "FROM saf.cursor c, {MINE} ORDER BY c.shard FOR UPDATE OF c",
        "FROM saf.cursor c, {MINE} ORDER BY c.shard",
        f"{OWNERS}cursors_that_are_locked_are_so_until_the_transaction_ends",
    ),
    mutant(
        "an open batch is finished",
        CURSOR,
        'CLOSED = f"SELECT count(*) FROM saf.cursor c, {SAME} AND c.open IS NULL"',
        'CLOSED = f"SELECT count(*) FROM saf.cursor c, {SAME}"',
        f"{OWNERS}a_batch_is_finished_once_all_of_its_shards_are_closed",
    ),
    mutant(
        "a batch that has so many rows has more",
        CURSOR,
        "return bool(count > rows)",
        "return bool(count >= rows)",
        f"{OWNERS}a_batch_has_more_than_as_many_rows_as_it_has_left_and_not_one_more",
    ),
    mutant(
        "a key's attempts are those of any reader",
        RETRIES,
        "subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.KEY}'\n"
        "AND subject = %(lane)s\n",
        "destination = '' AND kind = '{Kind.KEY}'\nAND subject = %(lane)s\n",
        f"{ROWS}the_attempts_and_the_messages_of_a_key_are_those_of_one_reader",
    ),
    mutant(
        "delayed messages of another reader say when a shard is due",
        RETRIES,
        "SELECT deliver_at FROM saf.parked p\nWHERE subscription_id = %(subscription_id)s AND",
        "SELECT deliver_at FROM saf.parked p\nWHERE",
        f"{ROWS}delayed_messages_are_due_when_the_first_of_their_own_reader_is",
    ),
    mutant(
        "delayed messages of another reader's shard are forgotten",
        RETRIES,
        "DELETE FROM saf.backoff b\nWHERE subscription_id = %(subscription_id)s AND destination",
        "DELETE FROM saf.backoff b\nWHERE destination",
        f"{ROWS}delayed_messages_are_due_when_the_first_of_their_own_reader_is",
    ),
]
