"""What comes by HTTP, events and chunks of other installations: whose, how much, and how often."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

ASGI, EVENT = "saf/webhooks/asgi.py", "saf/webhooks/event.py"
RECEIVER, DELIVERIES = "saf/webhooks/receiver.py", "saf/webhooks/deliveries.py"
INBOX, HTTPS = "contract/test_webhook_inbox.py", "contract/test_https.py"
CHUNKS = "saf/destinations/https/chunks.py"
BOUNDED = f"{HTTPS}::test_what_would_take_more_memory_than_it_has_bytes_is_not_understood"
REFUSED = f"{INBOX}::test_what_is_not_accepted_is_answered_with_the_reason"

MUTANTS: list[Mutant] = [
    mutant(
        "a webhook is taken from anybody",
        RECEIVER,
        "signed_id = verify(headers, body, known)",
        'signed_id = headers["webhook-id"]',
        REFUSED,
    ),
    mutant(
        "a delivery is taken from anybody",
        DELIVERIES,
        "        verify(headers, body, known)\n",
        "        ...\n",
        f"{HTTPS}::test_each_secret_of_the_other_end_is_good_and_no_other",
    ),
    mutant(
        "a source that is not named delivers",
        DELIVERIES,
        "if self._sources is not None and source not in self._sources:",
        "if self._sources is None and source is None:",
        f"{HTTPS}::test_a_source_that_is_not_named_delivers_nothing",
    ),
    mutant(
        "a service that is not named is delivered to",
        DELIVERIES,
        'self._inbox.PostgresInbox("here", self._at.dsn, services=self._services)',
        'self._inbox.PostgresInbox("here", self._at.dsn, services=None)',
        f"{HTTPS}::test_a_service_that_is_not_for_the_partner_waits_and_others_go_on",
    ),
    mutant(
        "the length that a request says is not looked at, nor what comes",
        ASGI,
        "                if len(body) > most:\n                    raise TooLarge\n",
        "",
        f"{INBOX}::test_a_body_that_says_no_length_is_bounded_all_the_same",
    ),
    mutant(
        "an event without an id is one",
        EVENT,
        'NEEDED = ("id", "source", "type")',
        'NEEDED = ("source", "type")',
        REFUSED,
    ),
    mutant(
        "a stranger's header stands for saf's",
        EVENT,
        "if name not in NOT_CARRIED and not name.startswith(RESERVED_HEADER)",
        "if name not in NOT_CARRIED",
        f"{INBOX}::test_no_event_brings_headers_that_only_saf_writes",
    ),
    mutant(
        "an event of any time is taken",
        RECEIVER,
        "    if moment >= LAST_DAY:",
        "    if False:",
        REFUSED,
    ),
    mutant(
        "an event of the first day of the calendar stops who reads it west of UTC",
        RECEIVER,
        "    return moment if moment >= FIRST_DAY else now",
        "    return moment",
        f"{INBOX}::test_an_event_that_says_no_time_has_happened_now",
    ),
    mutant(
        "a message of the first day of the calendar holds up its shard west of UTC",
        "saf/received.py",
        "CASE WHEN {name} < {FIRST_MOMENT} THEN {FIRST_MOMENT} ELSE {name} END AS {name}",
        "{name}",
        "contract/test_hostile_receiving.py"
        "::test_the_first_day_of_the_calendar_holds_nobody_up_whatever_the_time_zone",
    ),
    mutant(
        "an event's id is not the one that is signed",
        RECEIVER,
        "    if one.id != signed_id:",
        "    if False:",
        f"{INBOX}::test_a_request_that_is_altered_stores_no_other_event",
    ),
    mutant(
        "an event is known by what nobody has signed",
        RECEIVER,
        '_digest(service, "" if signed_ids else one.source, one.id)',
        "_digest(service, one.source, one.id)",
        f"{INBOX}::test_a_request_that_is_altered_stores_no_other_event",
    ),
    mutant(
        "an event is answered before it is durable",
        RECEIVER,
        "THEN set_config('synchronous_commit', 'on', true) END",
        "THEN '' END",
        f"{INBOX}::test_an_event_is_durable_before_it_is_answered_whatever_the_default",
    ),
    mutant(
        "a webhook waits for a lock without end",
        RECEIVER,
        "replace(link, always=bounds)",
        "replace(link)",
        f"{INBOX}::test_a_lock_that_is_held_is_answered_with_503_and_what_comes_later_is_stored",
    ),
    mutant(
        "a webhook waits for a database that has vanished without end",
        RECEIVER,
        "lambda: shut([descriptor])",
        "lambda: None",
        f"{INBOX}::test_a_database_whose_machine_has_vanished_is_answered_with_503",
    ),
    mutant(
        "requests are taken without end",
        "saf/webhooks/asgi.py",
        "        if self._inside >= self._at_once:",
        "        if False:",
        f"{INBOX}::test_who_comes_while_enough_are_in_hand_is_to_come_later",
    ),
    mutant(
        "a request without a signature takes a place",
        "saf/webhooks/asgi.py",
        "        stated(headers)\n",
        "",
        f"{HTTPS}::test_slow_requests_without_a_signature_of_now_take_nobodys_place",
    ),
    mutant(
        "a partner vouches for the senders of others",
        DELIVERIES,
        "rows=self._vouched_by(chunk.rows, chunk.source)",
        "rows=chunk.rows",
        f"{HTTPS}::test_a_partner_vouches_for_its_own_senders_alone",
    ),
    mutant(
        "a chunk may have rows without bytes",
        CHUNKS,
        "        if stream.schema.field(name).type != TYPES[name]:",
        "        if False:",
        BOUNDED,
    ),
    mutant(
        "a chunk may be compressed",
        CHUNKS,
        "field(batch, COMPRESSION)",
        "0",
        BOUNDED,
    ),
    mutant(
        "columns of a chunk may share their bytes",
        CHUNKS,
        "    if rows.nbytes > len(body):",
        "    if False:",
        BOUNDED,
    ),
    mutant(
        "an answer that says that it is the last one is waited for without end",
        "saf/destinations/https/link.py",
        "    def end(self) -> None:",
        "    def close(self) -> None:\n        super().close()\n        self._own = None\n\n"
        "    def end(self) -> None:",
        f"{HTTPS}::test_a_server_that_drips_its_answer_is_waited_for_only_so_long",
    ),
    mutant(
        "a partner's answer is taken for the messages' fault",
        "saf/destinations/https/wire.py",
        "UNLIKE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)",
        "UNLIKE = (LookupError, TypeError, ValueError)",
        f"{HTTPS}::test_whatever_a_partner_answers_about_a_chunk_no_message_is_to_blame",
    ),
    mutant(
        "an event's data is written anew",
        EVENT,
        'return whole, data.encode(), content_type or "application/json"',
        'return whole, json.dumps(json.loads(data)).encode(), content_type or "application/json"',
        f"{INBOX}::test_data_that_is_json_is_stored_to_the_last_byte",
    ),
    mutant(
        "an event is remembered though its service does not live here",
        RECEIVER,
        "    WHERE lives AND NOT EXISTS",
        "    WHERE NOT EXISTS",
        f"{INBOX}::test_an_event_for_a_service_that_does_not_live_here_is_refused",
    ),
    mutant(
        "what is remembered is never forgotten",
        RECEIVER,
        "ORDER BY stored_at LIMIT 5 FOR UPDATE SKIP LOCKED",
        "ORDER BY stored_at LIMIT 0 FOR UPDATE SKIP LOCKED",
        f"{INBOX}::test_what_is_remembered_is_bounded",
    ),
]
