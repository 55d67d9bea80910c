"""The inbox behind a URL: events are stored once, whoever repeats them, if they are signed."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

import saf.webhooks
from saf.broker import services
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.signing.webhook import key_of, sign
from saf.webhooks import receiver
from saf.webhooks.event import NoEvent, event
from tests.endpoints import Partner, dispatcher, dispatching, program, serving
from tests.pipeline import connect
from tests.processes import start
from tests.receivers import prepare, store
from tests.silence import Silence
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
    number: str = "",
    **headers: str,
) -> tuple[int, str]:
    """Sign and send an event, by its id or another number; return status and text of the answer."""
    parts = urlsplit(url)
    given = {**MINIMAL, **{name.replace("_", "-"): value for name, value in headers.items()}}
    given = {name: value for name, value in given.items() if value}
    number = number or given.get("ce-id") or MINIMAL["ce-id"]
    signed = sign(number, int(at or time.time()), body, [key_of(secret)])
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


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
@pytest.mark.parametrize(
    "said", ["0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "0001-01-01", "yesterday", ""]
)
def test_an_event_that_says_no_time_has_happened_now(inbox: Dsn, zone: str, said: str) -> None:
    with connect(inbox) as connection:
        connection.execute(f"ALTER DATABASE {inbox.database} SET timezone = '{zone}'")
    app = saf.webhooks.inbox(inbox, "billing", secrets=SECRET)
    with serving(Partner(), app) as partner:
        assert send(partner.url, ce_time=said) == (204, "")
    with saf.receive(inbox, "billing") as delivery:
        (one,) = delivery
        assert timedelta() <= datetime.now(UTC) - one.created_at < timedelta(minutes=1)


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
        whole: dict[str, Any] = {**event, **more}
        assert send(url, json.dumps(whole).encode(), number=whole["id"], **kind) == (204, "")
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
        ({"ce_specversion": "0.3"}, 400, "not an event of CloudEvents 1.0"),
        ({"content_type": "application/cloudevents-batch+json"}, 400, "is not supported"),
        ({"content_type": "application/cloudevents+json", "body": b"["}, 400, "is not JSON"),
        ({"ce_subject": "x" * 2000}, 400, "key: 2,000 bytes are more than 1,024"),
        ({"ce_type": "a%00b"}, 400, "holds a NUL byte"),
        (
            {"ce_time": "9999-12-30T23:00:00-01:00"},
            400,
            "time: 9999-12-30T23:00:00-01:00 is before 0001-01-01 or after 9999-12-30, in UTC",
        ),
        ({"number": "8"}, 400, "the event's id is not the webhook-id"),
        ({**AS_JSON, "body": whole('"data": 1'), "number": "8"}, 400, "id is not the webhook-id"),
        ({"ce_id": "%ED%A0%80"}, 400, "the event's id is not Unicode text"),
        ({**AS_JSON, "body": whole('"id": "\\ud800"')}, 400, "the event's id is not Unicode text"),
        ({**AS_JSON, "body": whole('"source": "\\ud800"')}, 400, "source is not Unicode text"),
        ({**AS_JSON, "body": b"[1]"}, 400, "is not a JSON object"),
        ({**AS_JSON, "body": whole('"data": NaN')}, 400, "is not JSON"),
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


def test_a_body_has_one_mebibyte_where_nothing_else_is_said(inbox: Dsn) -> None:
    app = saf.webhooks.inbox(inbox, "billing", secrets=[SECRET])
    with serving(Partner(), app) as partner:
        sizes = (1 << 20, (1 << 20) + 1)
        answers = [send(partner.url, b"7" * size, ce_id=str(size))[0] for size in sizes]
    assert answers == [204, 413]


@pytest.mark.parametrize("name", ["id", "source", "type"])
def test_an_event_without_a_text_that_it_needs_is_refused(name: str) -> None:
    """Also if the text is empty: then it identifies nothing."""
    given = {**MINIMAL, f"ce-{name}": ""}
    with pytest.raises(NoEvent, match=f"the event has no {name}"):
        event(given, b"7")
    del given[f"ce-{name}"]
    with pytest.raises(NoEvent, match=f"the event has no {name}"):
        event(given, b"7")


def test_a_body_that_says_no_length_is_bounded_all_the_same(inbox: Dsn, url: str) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    pieces = iter([bytes(1_000)] * 50)
    signed = sign("7", int(time.time()), bytes(50_000), [key_of(SECRET)])
    with suppress(ConnectionError):  # it may be answered before all of it was sent
        connection.request("POST", parts.path, pieces, {**MINIMAL, **signed}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert stored(inbox) == []


def test_a_request_that_is_altered_stores_no_other_event(inbox: Dsn, url: str) -> None:
    """Of what comes in headers, Standard Webhooks signs the id alone."""
    assert send(url, ce_subject="A-1") == (204, "")
    others: list[dict[str, Any]] = [
        {"ce_type": "Refunded", "ce_subject": "B-2", "ce_time": "2026-01-31T12:00:00Z"},
        {"content_type": "text/plain"},
    ]
    for other in others:
        assert send(url, **other) == (204, "")
    with capture_logs() as lines:
        status, why = send(url, ce_source="/other")
    assert (status, "from another source" in why) == (409, True)
    assert [line["event"] for line in lines] == ["webhook_refused"]
    assert send(url, ce_id="8", number="7")[0] == 400
    assert len(stored(inbox)) == 1
    as_json = {**AS_JSON, "body": whole('"id": "9", "data": 1'), "number": "9"}
    assert send(url, **as_json) == (204, "")
    in_headers: dict[str, Any] = {"body": as_json["body"], "number": "9", "ce_id": "9"}
    assert send(url, **in_headers) == (204, "")
    assert send(url, **in_headers, ce_source="/other")[0] == 409
    assert [body for *_, body, _ in stored(inbox)] == ["7", "1"]


def test_where_ids_are_not_the_signed_ones_an_event_is_known_by_its_source_and_id(
    inbox: Dsn,
) -> None:
    app = saf.webhooks.inbox(inbox, "billing", secrets=SECRET, signed_ids=False)
    with serving(Partner(), app) as partner:
        for source in ("/shop", "/other", "/shop"):
            assert send(partner.url, ce_source=source, number=str(uuid4())) == (204, "")
    assert [headers["source"] for *_, headers in stored(inbox)] == ["/shop", "/other"]


def test_an_event_that_was_known_by_its_source_is_known_where_ids_are_the_signed_ones_since(
    inbox: Dsn,
) -> None:
    """A setting that is changed lets nobody store again what is stored."""
    number = str(uuid4())
    for signed_ids in (False, True, True):
        app = saf.webhooks.inbox(inbox, "billing", secrets=SECRET, signed_ids=signed_ids)
        with serving(Partner(), app) as partner:
            assert send(partner.url, ce_id=number) == (204, "")
    assert len(stored(inbox)) == 1


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("default", ["off", "local", "on", "remote_apply"])
def test_an_event_is_durable_before_it_is_answered_whatever_the_default(
    inbox: Dsn, default: str, autocommit: bool
) -> None:
    with connect(inbox) as connection:
        connection.execute(f"ALTER DATABASE {inbox.database} SET synchronous_commit = {default}")
        connection.execute("CREATE TABLE seen (setting text)")
        connection.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO seen SELECT current_setting('synchronous_commit'); RETURN NULL; END $$"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER note AFTER INSERT ON saf.webhook DEFERRABLE "
            "INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note()"
        )
    options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    engine = inbox.engine(**options)
    app = saf.webhooks.inbox(engine, "billing", secrets=SECRET)
    with serving(Partner(), app) as partner:
        assert send(partner.url) == (204, "")
    engine.dispose()
    with connect(inbox) as connection:
        (seen,) = fetch(connection, "SELECT DISTINCT setting FROM seen")
    assert seen == ("remote_apply" if default == "remote_apply" else "on",)


# A database that does not answer


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "STORE_SECONDS", 0.5)


@pytest.mark.usefixtures("hasty")
def test_a_lock_that_is_held_is_answered_with_503_and_what_comes_later_is_stored(
    inbox: Dsn, url: str
) -> None:
    with connect(inbox) as connection, connection.transaction():
        connection.execute("LOCK TABLE saf.webhook")
        began = time.monotonic()
        assert send(url) == (503, "try again later")
        assert time.monotonic() - began < 5
    assert send(url) == (204, "")
    assert len(stored(inbox)) == 1


@pytest.mark.usefixtures("hasty")
def test_a_database_whose_machine_has_vanished_is_answered_with_503(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "GRACE_SECONDS", 0.5)
    with Silence(inbox) as between, between.dsn.connect(role="test") as connection:
        app = saf.webhooks.inbox(lambda: nullcontext(connection), "billing", secrets=SECRET)
        # closed first: a server ends when its requests have
        with serving(Partner(), app) as partner, closing(between):
            assert send(partner.url) == (204, "")
            between.fall()
            assert send(partner.url, ce_id="8") == (503, "try again later")
            until(lambda: connection.closed, 20)
    assert len(stored(inbox)) == 1


def test_an_engine_whose_database_is_away_is_answered_with_503() -> None:
    nowhere = Dsn("host=127.0.0.1 port=1 dbname=nowhere")
    engines: list[Any] = [
        nowhere,
        nowhere.conninfo,
        nowhere.engine(),
        sa.create_engine("postgresql+psycopg://127.0.0.1:1/nowhere"),
    ]
    for engine in engines:
        with serving(Partner(), saf.webhooks.inbox(engine, "billing", secrets=SECRET)) as partner:
            assert send(partner.url) == (503, "try again later")


def test_who_comes_while_enough_are_in_hand_is_to_come_later(inbox: Dsn) -> None:
    app = saf.webhooks.inbox(inbox, "billing", secrets=SECRET, at_once=1)
    with serving(Partner(), app) as partner:
        parts = urlsplit(partner.url)
        signed = sign("7", int(time.time()), b"7", [key_of(SECRET)])
        unsigned = {**signed, "webhook-signature": "v1,none"}

        def answered(status: int) -> bool:
            return send(partner.url, ce_id="8")[0] == status

        for headers, status in ((unsigned, 204), (signed, 503)):
            with closing(socket.create_connection((parts.hostname, parts.port))) as slow:
                said = {**MINIMAL, **headers, "host": "here", "content-length": "1"}
                lines = [f"POST {parts.path} HTTP/1.1", *(f"{n}: {v}" for n, v in said.items())]
                slow.sendall("\r\n".join([*lines, "", ""]).encode())
                until(partial(answered, status))
        until(lambda: send(partner.url)[0] == 204)
    assert len(stored(inbox)) == 2


def test_a_body_that_does_not_arrive_in_time_is_answered_with_408(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiver, "BODY_SECONDS", 0.01)
    app = saf.webhooks.inbox("dbname=nowhere", "billing", secrets=SECRET)
    signed = sign("7", int(time.time()), b"7", [key_of(SECRET)])
    headers = [(name.encode(), value.encode()) for name, value in signed.items()]
    answers: list[Any] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def keep(part: Any) -> None:
        answers.append(part)

    scope = {"type": "http", "method": "POST", "headers": headers}

    async def call() -> None:
        await app(scope, never, keep)

    asyncio.run(call())
    assert [part.get("status", part.get("body")) for part in answers] == [408, b"it took too long"]


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
        assert send(partner.url) == (404, "no service 'biling' here")
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
        # of each event, its id, and the id with its source
        assert fetch(connection, "SELECT count(*) FROM saf.webhook") == [(10,)]


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
