"""The inbox behind a URL: events are stored once, whoever repeats them, if they are signed."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest

import saf.webhooks
from saf.broker import services
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.signing.webhook import key_of, sign
from tests.endpoints import Partner, dispatcher, dispatching, program, serving
from tests.pipeline import connect
from tests.processes import start
from tests.receivers import prepare, store
from tests.waits import until

SECRET = "whsec_" + "c2Vj" * 8
OTHER_SECRET = "whsec_" + "b2xk" * 8
MINIMAL = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "Paid"}


AS_JSON: dict[str, Any] = {
    "content_type": "application/cloudevents+json",
    **dict.fromkeys(("ce_specversion", "ce_id", "ce_source", "ce_type"), ""),
}


def whole(more: str) -> bytes:
    """An event as JSON, which has more members as they are given."""
    return (
        f'{{"specversion": "1.0", "id": "7", "source": "/shop", "type": "Paid", {more}}}'.encode()
    )


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
    return mom


@pytest.fixture
def url(inbox: Dsn) -> Iterator[str]:
    app = saf.webhooks.inbox(inbox, "billing", secrets=[OTHER_SECRET, SECRET], max_bytes=10_000)
    with serving(Partner(), app) as partner:
        yield partner.url


def send(
    url: str,
    body: bytes = b"7",
    *,
    method: str = "POST",
    secret: str = SECRET,
    at: float | None = None,
    **headers: str,
) -> tuple[int, str]:
    """Sign and send an event; return status and text of the answer."""
    parts = urlsplit(url)
    given = {**MINIMAL, **{name.replace("_", "-"): value for name, value in headers.items()}}
    given = {name: value for name, value in given.items() if value}
    signed = sign(str(uuid4()), int(at or time.time()), body, [key_of(secret)])
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request(method, parts.path, body, {**given, **signed})
    answer = connection.getresponse()
    said = answer.status, answer.read().decode()
    connection.close()
    return said


def stored(inbox: Dsn) -> list[tuple[Any, ...]]:
    with connect(inbox) as connection:
        return fetch(
            connection,
            "SELECT key, message_type, convert_from(body, 'UTF8'), headers FROM saf.inbox "
            "ORDER BY id",
        )


def test_an_event_is_stored_once_however_often_it_is_sent(inbox: Dsn, url: str) -> None:
    given: dict[str, Any] = {
        "content_type": "text/plain",
        "ce_subject": "A-1",
        "ce_traceid": "%C3%BC%25",
    }
    for _ in range(3):
        assert send(url, **given) == (204, "")
    assert send(url, **given, ce_id="8") == (204, "")
    headers = {
        "content-type": "text/plain",
        "source": "/shop",
        "subject": "A-1",
        "traceid": "ü%",
    }
    assert stored(inbox) == [("A-1", "Paid", "7", headers)] * 2
    with saf.receive(inbox, "billing") as delivery:
        assert [one.message_type for one in delivery] == ["Paid", "Paid"]


def test_many_that_send_the_same_event_at_once_store_it_once(inbox: Dsn, url: str) -> None:
    async def all_at_once() -> list[tuple[int, str]]:
        return await asyncio.gather(*(asyncio.to_thread(send, url) for _ in range(10)))

    assert set(asyncio.run(all_at_once())) == {(204, "")}
    assert len(stored(inbox)) == 1


@pytest.mark.parametrize("zone", ["Z", "+23:59", "-23:59"])
def test_an_event_has_happened_when_it_says(inbox: Dsn, url: str, zone: str) -> None:
    said = f"2026-01-31T12:00:00{zone}"
    assert send(url, ce_time=said) == (204, "")
    with saf.receive(inbox, "billing") as delivery:
        assert [one.created_at for one in delivery] == [datetime.fromisoformat(said)]


@pytest.mark.parametrize(
    "data",
    [
        '{"n": [1e400, -0, 0.1000000000000000055, 1.50] ,"n":7}',
        "1" * 5000,
        '"\\ud800 {,:"',
        '{ "data": {}, "\\"}": "}" }',
        "null",
        "[ ]",
    ],
)
@pytest.mark.parametrize(
    "written", ['"data": {}', '"data" :\n {} ,"x": "y"', '"o": {{"data": 1}}, "data":{}']
)
def test_data_that_is_json_is_stored_to_the_last_byte(
    inbox: Dsn, url: str, data: str, written: str
) -> None:
    assert send(url, whole(written.format(data)), **AS_JSON) == (204, "")
    ((_, _, body, _),) = stored(inbox)
    assert body == data


def test_an_event_as_json_is_stored_as_well(inbox: Dsn, url: str) -> None:
    event = {"specversion": "1.0", "id": str(uuid4()), "source": "/shop", "type": "Paid"}
    kind: dict[str, Any] = {
        "content_type": "application/cloudevents+json",
        "ce_id": "",
        "ce_specversion": "",
    }
    for more in (
        {"data": {"total": 7}, "partitionkey": "A-1"},
        {"data": "7", "datacontenttype": "text/plain", "id": "2"},
        {"data_base64": "Nw==", "id": "3"},
    ):
        assert send(url, json.dumps({**event, **more}).encode(), **kind) == (204, "")
    rows = [(key, body) for key, _, body, _ in stored(inbox)]
    assert rows == [("A-1", '{"total": 7}'), (None, "7"), (None, "7")]
    with connect(inbox) as connection:
        ((first,), *_) = fetch(connection, "SELECT message_id FROM saf.inbox ORDER BY id")
    assert first == UUID(event["id"])


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        ({"secret": "whsec_" + "eHh4" * 8}, 401, "no signature in it is right"),
        ({"at": 1_000_000_000}, 401, "s ago"),
        ({"ce_id": ""}, 400, "the event has no id"),
        ({"ce_specversion": "0.3"}, 400, "no event of CloudEvents 1.0"),
        ({"content_type": "application/cloudevents-batch+json"}, 400, "is not understood"),
        ({"content_type": "application/cloudevents+json", "body": b"["}, 400, "is no JSON"),
        ({"ce_subject": "x" * 2000}, 400, "key: 2,000 bytes are more than 1,024"),
        ({"ce_type": "a%00b"}, 400, "holds a NUL byte"),
        (
            {"ce_time": "0001-01-01T00:00:00+14:00"},
            400,
            "time: 0001-01-01T00:00:00+14:00 is before",
        ),
        (
            {"ce_time": "9999-12-30T23:00:00-01:00"},
            400,
            "time: 9999-12-30T23:00:00-01:00 is before",
        ),
        ({**AS_JSON, "body": b"[1]"}, 400, "is no JSON object"),
        ({**AS_JSON, "body": whole('"data": NaN')}, 400, "is no JSON"),
        ({**AS_JSON, "body": whole('"data": 1, "n": 1e400')}, 400, "headers: not JSON"),
        (
            {**AS_JSON, "body": whole('"datacontenttype": "a\\u0000", "data": 1')},
            400,
            "cannot hold NUL",
        ),
        (
            {**AS_JSON, "body": whole('"datacontenttype": "\\ud800", "data": 1')},
            400,
            "a lone surrogate is not Unicode text",
        ),
        ({**AS_JSON, "body": whole('"subject": "a\\u0000"')}, 400, "key: 'a\\x00' holds a NUL"),
        ({**AS_JSON, "body": whole('"partitionkey": "\\ud800"')}, 400, "key: a lone surrogate"),
        ({**AS_JSON, "body": whole('"dataschema": "\\ud800"')}, 400, "headers: a lone surrogate"),
        ({"body": bytes(10_001)}, 413, "more than 10,000 bytes"),
        ({"method": "PUT"}, 405, "by POST"),
    ],
)
def test_what_is_not_accepted_is_answered_with_the_reason(
    inbox: Dsn, url: str, more: dict[str, Any], status: int, says: str
) -> None:
    answered, text = send(url, **more)
    assert (answered, says in text) == (status, True), text
    assert stored(inbox) == []


def test_a_body_that_says_no_length_is_bounded_all_the_same(inbox: Dsn, url: str) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    pieces = iter([bytes(1_000)] * 50)
    with suppress(ConnectionError):  # it may be answered before all of it was sent
        connection.request("POST", parts.path, pieces, MINIMAL, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert stored(inbox) == []


def test_no_event_brings_headers_that_only_saf_writes(inbox: Dsn, url: str) -> None:
    forged: dict[str, Any] = {
        "ce_saf_verified_from": '{"service": "bank"}',
        "ce_saf_signature": "{}",
    }
    assert send(url, **forged, ce_traceid="t") == (204, "")
    assert [set(headers) for *_, headers in stored(inbox)] == [
        {"content-type", "source", "traceid"}
    ]


def test_an_event_for_a_service_that_does_not_live_here_is_refused(inbox: Dsn) -> None:
    with serving(Partner(), saf.webhooks.inbox(inbox, "biling", secrets=SECRET)) as partner:
        assert send(partner.url) == (404, "there is no service 'biling' here")
    with connect(inbox) as connection:
        for table in ("webhook", "inbox"):
            assert fetch(connection, f"SELECT count(*) FROM saf.{table}") == [(0,)]
    with pytest.raises(UsageError):
        saf.webhooks.inbox(inbox, "billing", secrets=["secret"])


def test_what_is_remembered_is_bounded(inbox: Dsn, url: str) -> None:
    for number in range(10):
        send(url, ce_id=str(number))
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.webhook SET stored_at = now() - interval '15 days'")
    for number in range(10, 15):
        send(url, ce_id=str(number))
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.webhook") == [(5,)]


def test_two_installations_are_connected_by_https_alone_exactly_once_and_in_order(
    app: Dsn, inbox: Dsn
) -> None:
    prepare(app)
    store(app, keys=20, each=10)
    chance = random.Random(5)
    storing = saf.webhooks.inbox(inbox, "billing", secrets=SECRET)

    async def unlucky(scope: Any, receive: Any, send: Any) -> None:
        """Now and then, the answer gets lost: the event is stored, and the sender does not know."""
        lost = chance.random() < 0.1

        async def answer(event: Any) -> None:
            if lost and event["type"] == "http.response.start":
                event = {**event, "status": 502}
            await send(event)

        await storing(scope, receive, answer)

    with serving(Partner(), unlucky) as partner:
        more = {"secrets": [SECRET], "breaker_failures": 1000, "attempts": 1000}
        victim = start(program, app, partner.url, more)
        until(lambda: len(stored(inbox)) > 50)
        victim.kill()
        victim.join()
        with dispatching(dispatcher(app, partner, **more)):

            def all_there() -> bool:
                with connect(app) as connection:
                    connection.execute(
                        "UPDATE saf.backoff SET next_attempt_at = now() WHERE ctid = ANY (ARRAY("
                        "SELECT ctid FROM saf.backoff FOR UPDATE SKIP LOCKED))"
                    )
                return len(stored(inbox)) == 200

            until(all_there)
    by_key: dict[str, list[int]] = {}
    for key, _, body, _ in stored(inbox):
        by_key.setdefault(key, []).append(int(body))
    assert by_key == {f"k{k}": list(range(1, 11)) for k in range(1, 21)}
