"""What comes by HTTP, events and chunks of other installations: whose, how much, and how often."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

ASGI, EVENT = "saf/webhooks/asgi.py", "saf/webhooks/event.py"
RECEIVER, DELIVERIES = "saf/webhooks/receiver.py", "saf/webhooks/deliveries.py"
INBOX, HTTPS = "contract/test_webhook_inbox.py", "contract/test_https.py"
REFUSED = f"{INBOX}::test_what_is_not_accepted_is_answered_with_the_reason"

MUTANTS: list[Mutant] = [
    mutant(
        "a webhook is taken from anybody",
        RECEIVER,
        "            verify(headers, body, known)\n",
        "            ...\n",
        REFUSED,
    ),
    mutant(
        "a delivery is taken from anybody",
        DELIVERIES,
        "            verify(headers, body, known)\n",
        "            ...\n",
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
        "an event's data is written anew",
        EVENT,
        'return whole, data.encode(), content_type or "application/json"',
        'return whole, json.dumps(json.loads(data)).encode(), content_type or "application/json"',
        f"{INBOX}::test_data_that_is_json_is_stored_to_the_last_byte",
    ),
    mutant(
        "an event is remembered though its service does not live here",
        RECEIVER,
        "SELECT %(digest)s::bytea FROM here WHERE lives",
        "SELECT %(digest)s::bytea FROM here",
        f"{INBOX}::test_an_event_for_a_service_that_does_not_live_here_is_refused",
    ),
    mutant(
        "what is remembered is never forgotten",
        RECEIVER,
        "ORDER BY stored_at LIMIT 3 FOR UPDATE SKIP LOCKED",
        "ORDER BY stored_at LIMIT 0 FOR UPDATE SKIP LOCKED",
        f"{INBOX}::test_what_is_remembered_is_bounded",
    ),
]
