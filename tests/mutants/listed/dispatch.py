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
SOURCE, GUARD, BREAKER, WEBHOOKS = (
    "saf/dispatch/source.py",
    "saf/dispatch/guard.py",
    "saf/dispatch/breaker.py",
    "saf/webhooks/receiver.py",
)
DISPATCH, HOSTILE, INBOX, IN_A_SHARD = (
    "contract/test_dispatch.py",
    "contract/test_hostile_endpoints.py",
    "contract/test_webhook_inbox.py",
    "unit/test_progress.py",
)
KILLED = f"{DISPATCH}::test_after_a_kill_only_what_was_in_flight_is_sent_again"

MUTANTS: list[Mutant] = [
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
        SENDING,
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
        SENDING,
        " or answer.retry_after is not None:",
        ":",
        f"{DISPATCH}::test_retry_after_is_honoured",
    ),
    mutant(
        "a redirect is followed",
        "saf/dispatch/http.py",
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
]
