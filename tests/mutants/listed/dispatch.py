"""Dispatching: what is marked, who is to blame, whom a dispatcher connects to."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

PROGRESS, WINDOW, SENDING, SESSION, MARKING = (
    "saf/dispatch/progress.py",
    "saf/dispatch/window.py",
    "saf/dispatch/sending.py",
    "saf/dispatch/session.py",
    "saf/dispatch/marking.py",
)
SOURCE, GUARD, BREAKER, WEBHOOKS, JUDGING = (
    "saf/dispatch/source.py",
    "saf/dispatch/guard.py",
    "saf/dispatch/breaker.py",
    "saf/webhooks/receiver.py",
    "saf/dispatch/judging.py",
)
DISPATCH, REPLIES, HOSTILE, INBOX, IN_A_SHARD = (
    "contract/test_dispatch.py",
    "contract/test_dispatch_replies.py",
    "contract/test_hostile_endpoints.py",
    "contract/test_webhook_inbox.py",
    "unit/test_progress.py",
)
KILLED = f"{DISPATCH}::test_after_a_kill_only_what_was_in_flight_is_sent_again"

HTTP2 = "contract/test_dispatch_http2.py"

MUTANTS: list[Mutant] = [
    mutant(
        "in a backlog, the first shards are read again and again",
        "saf/dispatch/read_ahead.py",
        "            key=lambda hand: hand.turn,\n",
        "            key=lambda hand: len(hand.pending),\n",
        f"{DISPATCH}::test_in_a_backlog_all_shards_take_turns",
    ),
    mutant(
        "a connection of HTTP/2 that ends in good order costs its requests an attempt",
        "saf/dispatch/http2.py",
        "                        if not left:\n",
        "                        if left:\n",
        f"{HTTP2}::test_a_connection_that_is_ended_after_some_requests_costs_no_attempt",
    ),
    mutant(
        "the guard does not look at addresses of HTTP/2",
        "saf/dispatch/pools.py",
        "                    check(address)\n",
        "",
        f"{HTTP2}::test_what_is_no_answer_is_said_in_one_line",
    ),
    mutant(
        "a connection of HTTP/2 goes on with answers on it that nobody reads",
        "saf/dispatch/pools.py",
        "            self.retire(pool)\n",
        "            pass\n",
        f"{HTTP2}::test_answers_that_come_too_late_hold_nothing_up",
    ),
    mutant(
        "an answer of HTTP/2 is read without end",
        "saf/dispatch/http2.py",
        "                if len(read) >= most:\n",
        "                if len(read) < 0:\n",
        f"{HTTP2}::test_of_a_long_answer_a_part_is_read",
    ),
    mutant(
        "a message that is in flight counts as complete once a later one is",
        PROGRESS,
        'f"[{one + 1},{following})"',
        'f"[{one},{following})"',
        f"{IN_A_SHARD}::test_what_is_marked_is_not_read_again_and_all_else_is",
    ),
    mutant(
        "what was complete beyond the position is not known to who takes over",
        SOURCE,
        "AND NOT id <@ c.ids\n",
        "\n",
        KILLED,
    ),
    mutant(
        "answers are not held up by marks",
        SENDING,
        "            and window.in_flight + window.unmarked < 2 * most\n",
        "",
        f"{DISPATCH}::test_nothing_more_is_sent_while_marks_cannot_be_written",
    ),
    mutant(
        "another owner's shard is marked",
        MARKING,
        "  AND c.owner = %(owner)s AND c.epoch = m.epoch\n",
        "",
        f"{DISPATCH}::test_marks_of_a_shard_that_another_member_has_taken_over_write_nothing",
    ),
    mutant(
        "a shard goes to another member while a message of it is in flight",
        SESSION,
        "(window.leaving - busy)",
        "window.leaving",
        f"{DISPATCH}::test_dispatchers_that_come_and_go_share_the_keys_and_repeat_nothing",
    ),
    mutant(
        "an endpoint that is down uses up attempts",
        JUDGING,
        "replace(counted, attempts=message.attempt - 1)",
        "counted",
        f"{DISPATCH}::test_an_endpoint_that_is_down_uses_up_no_attempts",
    ),
    mutant(
        "what waits behind a message is sent before it",
        SOURCE,
        "            window.add(message, behind=row[width + 1])",
        "            window.add(message, behind=False)",
        f"{DISPATCH}::test_a_message_that_fails_waits_and_only_its_key_behind_it",
    ),
    mutant(
        "an address inside of IPv6 passes for a public one",
        GUARD,
        "    if inside is not None and not is_public(str(inside)):\n        return False\n",
        "",
        "unit/test_doctests.py",
    ),
    mutant(
        "an event that is sent again is stored again",
        WEBHOOKS,
        "    FROM new\n",
        "    FROM here WHERE lives\n",
        f"{INBOX}::test_an_event_is_stored_once_however_often_it_is_sent",
    ),
    mutant(
        "attempts of suspects never count",
        BREAKER,
        "        suspects = self._suspects\n",
        "        suspects: list[T] = []\n",
        f"{DISPATCH}::test_a_message_that_fails_waits_and_only_its_key_behind_it",
    ),
    mutant(
        "Retry-After is not heard",
        JUDGING,
        " or answer.retry_after is not None:",
        ":",
        f"{DISPATCH}::test_retry_after_is_honoured",
    ),
    mutant(
        "a redirect is followed",
        "saf/dispatch/http1.py",
        "allow_redirects=False",
        "allow_redirects=True",
        f"{HOSTILE}::test_a_redirect_is_not_followed",
    ),
    mutant(
        "an answer is read to its end, however long it is",
        "saf/dispatch/http.py",
        "MOST = 64 * 1024",
        "MOST = 64 << 30",
        f"{HOSTILE}::test_an_answer_of_a_gigabyte_takes_no_memory_and_counts_by_its_status",
    ),
    mutant(
        "a value may begin a new line of the headers",
        "saf/dispatch/envelope.py",
        "encoded(value) for name, value in said",
        "value for name, value in said",
        f"{DISPATCH}::test_the_sdk_of_cloudevents_reads_what_is_sent",
    ),
    mutant(
        "a body that is JSON is written anew into an event",
        "saf/dispatch/envelope.py",
        """data = b'"data": ' + body""",
        """data = b'"data": ' + json.dumps(json.loads(body)).encode()""",
        f"{DISPATCH}::test_an_event_as_json_has_a_body_that_is_json_to_the_last_byte",
    ),
    mutant(
        "a template rounds the numbers of a body",
        "saf/dispatch/template.py",
        "            return STRICT.decode(body.decode(json.detect_encoding(body)))",
        "            return json.loads(body)",
        f"{DISPATCH}::test_a_template_writes_the_numbers_of_a_body_as_they_are",
    ),
    mutant(
        "NaN is JSON",
        "saf/message.py",
        "parse_float=Number, parse_constant=no_number)",
        "parse_float=Number)",
        f"{DISPATCH}::test_an_event_as_json_has_a_body_that_is_json_to_the_last_byte",
    ),
    mutant(
        "a redirect leads anywhere",
        "saf/dispatch/http.py",
        "    return to if same or now_by_tls else None",
        "    return to",
        f"{HOSTILE}::test_a_redirect_is_followed_to_the_same_host_only_where_one_says_so",
    ),
    mutant(
        "a value breaks out of a template",
        "saf/dispatch/template.py",
        "        return as_json\n",
        "        return str\n",
        f"{DISPATCH}::test_a_template_makes_a_body_of_the_endpoints_own_form",
    ),
    mutant(
        "a reply does not say to what",
        "saf/dispatch/replies.py",
        "headers={**reply.headers(message), IN_REPLY_TO: str(message.message_id)}",
        "headers=reply.headers(message)",
        f"{REPLIES}::test_an_answer_is_sent_to_the_sender_in_the_order_of_its_key",
    ),
    mutant(
        "a reply that is refused is forgotten",
        MARKING,
        '        marks.bury += [(one, "failed", error) for one, error in refused]\n',
        "",
        f"{REPLIES}::test_a_reply_that_the_database_refuses_makes_a_dead_letter_and_others_go_on",
    ),
    mutant(
        "a dialog does not end with the reply",
        "saf/dispatch/talking.py",
        "        dialog.end(connection)",
        "        pass",
        f"{REPLIES}::test_a_dialog_ends_with_the_reply_where_its_contract_is_for_one",
    ),
    mutant(
        "a message of a dialog is sent before its turn",
        "saf/dispatch/talking.py",
        "found: Found = {one.message_id: Outcome() for one in some}",
        "found: Found = {one.message_id: _made(one, make) for one in some}",
        f"{REPLIES}::test_a_message_of_a_dialog_waits_for_an_earlier_one_and_a_repeated_one_is_dropped",
    ),
    mutant(
        "all messages of a batch are rejected with one of them",
        JUDGING,
        "        for message in reversed(messages):\n            self.window.put_back(message)\n",
        "        for message in messages:\n"
        '            self.window.reject(message, "rejected", answer.error)\n',
        f"{DISPATCH}::test_of_a_batch_that_is_rejected_only_the_message_at_fault_is_a_dead_letter",
    ),
    mutant(
        "what is complete beyond the position counts as unread",
        "saf/receiving/inbox.py",
        "since.id <@ d.ids AND pg_visible",
        "since.id < 0 AND pg_visible",
        f"{DISPATCH}::test_a_slow_key_delays_no_other",
    ),
]
