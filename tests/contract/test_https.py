"""A broker behind a URL: exactly once, killed, cut off, refused, limited; and who is not one."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pytest
from pydantic import SecretStr, ValidationError

import saf
import saf.webhooks
from saf.broker.services import create_service
from saf.cli.repair import in_words
from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.destinations import Refusal
from saf.destinations.https import Https
from saf.destinations.https.chunks import TYPES, body_of, chunk_of
from saf.destinations.https.wire import NotUnderstood
from saf.errors import (
    CannotReadBack,
    Fenced,
    Refused,
    Rejected,
    Unavailable,
    UnknownService,
    UsageError,
)
from saf.log.ring import purge
from saf.operating.decide import discard
from saf.operating.repair.send_again import Sent, send_again
from saf.routing.routes import add_topic, current_routes
from saf.setaside.lane import Kind
from saf.setaside.selection import ParkedMessages
from saf.signing.webhook import key_of, sign
from saf.testing.forwarder import Forwarder, all_stored, start
from tests import dialogs
from tests.broker_server import SECRET, BrokerServer, broker_server
from tests.certificates import certificate
from tests.destinations import NOWHERE, know, route, send_to
from tests.dialogs import SHOP, WAREHOUSE
from tests.endpoints import Got, Partner, Reply, listening, serving
from tests.lossy import Lossy
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    drain,
    forward,
    forwarding_rules,
    let_time_pass,
    send,
    stores,
)
from tests.ring import leave_slot
from tests.tiers import sized
from tests.waits import until

ARROW = b"vnd.apache.arrow"
HERE = b"6b1a6f8e-7d3f-4b6c-9a53-0f3a7c1e2d4b"


@pytest.fixture
def partner(mom: Dsn) -> Iterator[BrokerServer]:
    with broker_server(mom) as server:
        yield server


def ids(mom: Dsn) -> list[UUID]:
    with connect(mom) as connection:
        rows = fetch(connection, "SELECT message_id FROM saf.inbox ORDER BY id")
    return [message_id for (message_id,) in rows]


def of(rows: list[Any]) -> list[UUID]:
    return [row["message_id"] for row in rows]


def errors(app: Dsn, partner: Https) -> list[str]:
    """What forwarding there complains of."""
    return [one.error for one in forward(app, partner=partner) if one.error]


# Exactly once


def test_messages_are_there_in_their_order_and_each_once(
    app: Dsn, mom: Dsn, partner: BrokerServer
) -> None:
    with connect(app) as connection:
        for number in range(12):
            send(connection, str(number), key="k")
        forward(app, chunk_rows=5, partner=partner.at())
        send(connection, "12", key="k")
        forward(app, chunk_rows=5, partner=partner.at())
    assert bodies(mom) == [str(number) for number in range(13)]
    with connect(app) as connection, connect(mom) as there:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        assert fetch(there, "SELECT DISTINCT source FROM saf.inbox") == [(source,)]


@pytest.mark.parametrize("failpoint", ["mom_insert", "mom_commit"])
def test_a_server_that_is_killed_while_it_stores_has_each_message_once_in_the_end(
    mom: Dsn, failpoint: str
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(sized(2_000, 20_000))
    server = BrokerServer(dsn=mom)
    with closing(server.at().open("partner")) as destination:
        server.start(failpoint)
        with pytest.raises(Unavailable):
            destination.store(forwarder.chunk(rows), exactly_once=True)
        until(server.died)
        assert (ids(mom) == of(rows)) == (failpoint == "mom_commit")
        server.start()
        try:
            done = all_stored(destination.store(forwarder.chunk(rows), exactly_once=True))
            assert done.messages + done.dropped == len(rows)
            assert (done.dropped > 0) == (failpoint == "mom_commit")
        finally:
            server.kill()
    assert ids(mom) == of(rows)


@pytest.mark.parametrize("after", [0.01, 0.0, 0.05, 0.2][: sized(1, 4)])
def test_a_server_that_is_killed_at_any_moment_has_each_message_once_in_the_end(
    mom: Dsn, partner: BrokerServer, after: float
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(2_000)
    chunks = [forwarder.chunk(rows[first : first + 20]) for first in range(0, 2_000, 20)]
    with start(partner.at(), chunks) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        time.sleep(after)  # any moment will do
        partner.kill()
        victim.stdout.read()
        victim.wait(timeout=60)
    partner.start()
    with closing(partner.at().open("partner")) as destination:
        for chunk in chunks:
            destination.store(chunk, exactly_once=True)
    assert ids(mom) == of(rows)


def test_a_chunk_whose_answer_was_lost_is_there_once(mom: Dsn, partner: BrokerServer) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    chunk = forwarder.chunk(rows)
    with (
        Lossy(partner.port) as proxy,
        closing(partner.at(proxy.port).open("partner")) as destination,
    ):
        destination.connect()
        proxy.lose_answers_to(ARROW)
        with pytest.raises(Unavailable):
            destination.store(chunk, exactly_once=True)
        assert proxy.lost == 1
        proxy.lose_answers_to(b"")
        done = all_stored(destination.store(chunk, exactly_once=True))
    assert (done.messages, done.dropped) == (0, 300)
    assert ids(mom) == of(rows)


def test_a_process_that_was_stopped_stores_nothing_after_the_new_owner_did(
    mom: Dsn, partner: BrokerServer
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(400)
    chunks = [forwarder.chunk(rows[first : first + 4]) for first in range(0, 400, 4)]
    with start(partner.at(), chunks) as zombie:
        assert zombie.stdout is not None
        for _ in range(5):
            zombie.stdout.readline()
        zombie.send_signal(signal.SIGSTOP)
        done = len(ids(mom))
        forwarder.epoch += 1
        with closing(partner.at().open("partner")) as destination:
            destination.store(forwarder.chunk(rows), exactly_once=True)
            zombie.send_signal(signal.SIGCONT)
            zombie.stdout.read()
            assert zombie.wait(timeout=60) != 0 or done == 400
            with pytest.raises(Fenced):
                destination.store(chunks[0], exactly_once=True)
    assert ids(mom) == of(rows)


def test_it_is_the_broker_that_a_dsn_leads_to_so_that_one_may_take_the_others_place(
    app: Dsn, mom: Dsn, partner: BrokerServer
) -> None:
    with connect(app) as connection:
        send(connection, "0", key="k")
        forward(app, mom=mom)
        send(connection, "1", key="k")
        forward(app, mom=partner.at())
        send(connection, "2", key="k")
        forward(app, mom=mom)
    assert bodies(mom) == ["0", "1", "2"]


# What waits, and what is refused


def test_one_that_was_set_back_gets_all_again_that_was_sent_since_a_time_that_a_person_says(
    app: Dsn, mom: Dsn, other: Dsn, partner: BrokerServer
) -> None:
    there = {"partner": partner.at(), **stores(other=other)}

    def again(**options: Any) -> Sent:
        sent = send_again("app", app, there, current_routes, retention_seconds=86400, **options)
        assert sent is not None
        return sent

    with connect(app) as connection, connect(mom) as owner:
        route(connection, "shipping", "other")
        route(connection, "billing", "partner")
        for number in range(3):
            send_to(connection, "billing", str(number))
            send_to(connection, "shipping", f"s{number}")
            forward(app, partner=partner.at(), other=other)
        ((second,),) = fetch(
            connection,
            "SELECT created_at FROM saf.outbox WHERE to_service = 'billing' \
            ORDER BY id OFFSET 1 LIMIT 1",
        )
        owner.execute("DELETE FROM saf.inbox WHERE body <> '0'")
        owner.execute("UPDATE saf.watermark SET batch = 1, position = 1")
        send_to(connection, "billing", "3")
    assert "has lost messages that it acknowledged" in errors(app, partner.at())[0]
    with pytest.raises(CannotReadBack, match="saf replay --since"):
        again()
    tried = again(since=second, dry_run=True)
    assert ([len(ids) for ids in tried.by_destination.values()], tried.blind) == ([2], ("partner",))
    sent = again(since=second)
    assert (sent.set_back, sent.blind, sent.uncertain) == (("partner",), ("partner",), {})
    assert "partner cannot be read back" in in_words(sent)
    let_time_pass(app)
    forward(app, partner=partner.at(), other=other)
    assert bodies(mom) == ["0", "1", "2", "3"]
    assert bodies(other) == ["s0", "s1", "s2"]
    # nobody was set back any more, so nothing is sent blindly
    assert again(since=second, only_if_set_back=False).blind == ()


@pytest.mark.parametrize("discarded", [False, True])
def test_one_that_was_set_back_gets_a_topics_messages_again_that_wait_for_others(
    app: Dsn, mom: Dsn, other: Dsn, partner: BrokerServer, discarded: bool
) -> None:
    there = {"partner": partner.at(), **stores(other=other)}
    with connect(app) as connection, connect(mom) as owner:
        add_topic(connection, "prices")
        for name in there:
            route(connection, "prices", name)
        send_to(connection, "prices", "0")
        forward(app, partner=partner.at(), other=other)
        ((since,),) = fetch(connection, "SELECT now()")
        for number in (1, 2):
            send_to(connection, "prices", str(number))
            forward(app, partner=partner.at(), other=NOWHERE)
        if discarded:
            assert len(discard(connection, ParkedMessages(destination="other"), "away")) == 2
        owner.execute("DELETE FROM saf.inbox WHERE body <> '0'")
        owner.execute("UPDATE saf.watermark SET batch = 1, position = 1")
    sent = send_again("app", app, there, current_routes, since=since, retention_seconds=86400)
    assert sent is not None
    assert (sent.blind, sent.uncertain) == (("partner",), {"partner": 2} if discarded else {})
    for _ in range(2):
        let_time_pass(app)
        forward(app, partner=partner.at(), other=other)
    expected = (["0"], ["0"]) if discarded else (["0", "1", "2"], ["0", "1", "2"])
    assert (bodies(mom), bodies(other)) == expected


def test_one_that_was_set_back_to_before_what_was_purged_since_says_which_time_is_missing(
    app: Dsn, mom: Dsn, partner: BrokerServer
) -> None:
    there = {"partner": partner.at()}
    with connect(app) as connection, connect(mom) as owner:
        for number in range(2):
            send(connection, str(number), key="k")
            forward(app, partner=partner.at())
        ((oldest, now),) = fetch(
            connection, "SELECT min(created_at), clock_timestamp() FROM saf.outbox"
        )
        leave_slot(connection)
        purge(connection, "outbox", retention_seconds=0.0)
        owner.execute("DELETE FROM saf.inbox")
        owner.execute(
            "UPDATE saf.watermark "
            "SET batch = 0, position = 0, opened_at = opened_at - interval '3 days'"
        )
    long_ago = oldest - timedelta(days=3)
    sent = send_again("app", app, there, current_routes, since=long_ago, retention_seconds=86400)
    assert sent is not None
    assert sent.not_compared is not None
    since, until_ = sent.not_compared
    assert since is not None
    assert abs(oldest - timedelta(days=3) - since) < timedelta(minutes=5)
    assert abs(now - timedelta(days=1) - until_) < timedelta(minutes=5)
    assert "they may have been purged" in in_words(sent)


def test_while_it_is_down_messages_are_parked_in_order_and_others_go_on(
    app: Dsn, mom: Dsn, other: Dsn, partner: BrokerServer
) -> None:
    with connect(app) as connection:
        route(connection, "billing", "partner")
        route(connection, "shipping", "other")
        with partner.down():
            for number in range(4):
                send_to(connection, "billing", f"b{number}")
                send_to(connection, "shipping", f"s{number}")
            forward(app, chunk_rows=3, partner=partner.at(), other=other)
            assert bodies(other) == [f"s{number}" for number in range(4)]
        send_to(connection, "billing", "b4")
        for _ in range(2):
            let_time_pass(app)
            forward(app, chunk_rows=3, partner=partner.at(), other=other)
        assert bodies(mom) == [f"b{number}" for number in range(5)]
        assert fetch(connection, "SELECT count(*) FROM saf.parked") == [(0,)]


def test_a_message_that_is_rejected_is_a_dead_letter_and_its_neighbours_are_delivered(
    app: Dsn, mom: Dsn, partner: BrokerServer
) -> None:
    with connect(mom) as connection:
        connection.execute("ALTER TABLE saf.inbox ADD CHECK (body <> '3')")
    with connect(app) as connection:
        for number in range(6):
            send(connection, str(number), key="k")
        forward(app, partner=partner.at())
        ((reason, error),) = fetch(connection, "SELECT reason, error FROM saf.dead_letter")
    assert reason == "rejected"
    assert "violates check constraint" in error
    assert bodies(mom) == ["0", "1", "2", "4", "5"]


def test_a_chunk_that_is_too_large_for_the_application_is_delivered_in_parts(
    app: Dsn, mom: Dsn
) -> None:
    with broker_server(mom, options={"max_bytes": 20_000}) as partner, connect(app) as connection:
        for number in range(10):
            send(connection, f"{number}" * 5_000, key="k")
        send(connection, "x" * 20_000, key="k")
        forward(app, partner=partner.at())
        assert [body[0] for body in bodies(mom)] == [str(number) for number in range(10)]
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
        assert "are more than the max_bytes of its application, 20,000" in error


def test_a_service_that_is_not_for_the_partner_waits_and_others_go_on(app: Dsn, mom: Dsn) -> None:
    with (
        broker_server(mom, options={"services": ["billing"]}) as partner,
        connect(app) as connection,
    ):
        send_to(connection, "payroll", "mine", key="a")
        send_to(connection, "billing", "yours", key="b")
        forward(app, partner=partner.at())
        assert bodies(mom) == ["yours"]
        ((error,),) = fetch(connection, "SELECT error FROM saf.backoff")
        assert "has no service 'payroll'" in error


def test_a_source_that_is_not_named_delivers_nothing(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        send(connection, "0", key="k")
    with broker_server(mom, options={"sources": [str(uuid4())]}) as partner:
        (said,) = errors(app, partner.at())
        assert f"does not accept messages from source {source}" in said
        assert "Name it there in `sources`" in said
        with pytest.raises(Refused, match="does not accept messages"):
            partner.at().known("partner", source, role="test")
    with broker_server(mom, options={"sources": [source]}) as partner:
        let_time_pass(app)
        assert errors(app, partner.at()) == []
    assert bodies(mom) == ["0"]


def test_each_secret_of_the_other_end_is_good_and_no_other(mom: Dsn, partner: BrokerServer) -> None:
    forwarder = Forwarder()
    assert partner.at().identity("partner")
    other = partner.at(secret=SecretStr("whsec_" + "b2xk" * 8))
    assert other.identity("partner") == partner.at().identity("partner")
    wrong = partner.at(secret=SecretStr("whsec_" + "eHh4" * 8))
    with (
        closing(wrong.open("partner")) as destination,
        pytest.raises(Refused, match="no signature in it is right"),
    ):
        destination.store(forwarder.chunk(forwarder.messages(1)), exactly_once=True)
    assert ids(mom) == []


def test_what_is_altered_on_its_way_is_refused(mom: Dsn, partner: BrokerServer) -> None:
    forwarder = Forwarder()
    altered = forwarder.chunk([forwarder.message(body=b"pay 100")])

    class Between(Partner):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            body, more = b"", True
            while more:
                event = await receive()
                body += event.get("body", b"")
                more = event.get("more_body", False)
            link = http.client.HTTPConnection("127.0.0.1", partner.port)
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            link.request("POST", "/saf", body.replace(b"pay 100", b"pay 999"), headers)
            answer = link.getresponse()
            text = answer.read()
            link.close()
            await send({"type": "http.response.start", "status": answer.status, "headers": []})
            await send({"type": "http.response.body", "body": text})

    with serving(Between()) as between:
        port = int(between.url.split(":")[2].split("/")[0])
        with (
            closing(partner.at(port).open("partner")) as destination,
            pytest.raises(Refused, match="no signature in it is right"),
        ):
            destination.store(altered, exactly_once=True)
    assert ids(mom) == []


# Who is not one


@pytest.mark.parametrize(
    ("status", "text", "error", "says"),
    [
        (200, b"<html>Welcome</html>", Refused, "answers 200 OK: <html>Welcome</html>"),
        (200, b'{"stored": true}', Refused, "Let its URL lead to saf.webhooks.broker"),
        (200, b'{"version": 1}', Unavailable, "its answer does not name the inbox's broker"),
        (200, b'{"version": 2}', Refused, "speaks version 2 of the protocol"),
        (302, b"", Refused, "answers 302"),
        (404, b"not here", Refused, "answers 404"),
        (409, b'{"version": 1, "error": "fenced"}', Unavailable, "is not understood"),
        (400, b'{"version": 1, "error": "new"}', Unavailable, "is not understood"),
        (502, b"Bad Gateway", Unavailable, "answers 502"),
        (429, b"slowly", Unavailable, "answers 429"),
        (413, b"nginx", Rejected, "answers 413"),
        (
            200,
            b'{"version": 1, "identity": 5, "max_bytes": 1}',
            Unavailable,
            "does not name the inbox's broker",
        ),
        (
            200,
            b'{"version": 1, "identity": "%s", "max_bytes": 1e999}' % HERE,
            Unavailable,
            "does not name the inbox's broker",
        ),
        (409, b'{"version": 1, "error": []}', Unavailable, "is not understood"),
        (409, b'{"version": 1, "error": {"a": 1}}', Unavailable, "is not understood"),
    ],
)
def test_nothing_that_another_server_says_is_taken_for_stored(
    status: int, text: bytes, error: type[Exception], says: str
) -> None:
    forwarder = Forwarder()
    stranger = Partner()
    stranger.always(status, text, location="http://127.0.0.1:1/elsewhere")
    with serving(stranger):
        there = Https(server=stranger.url, secret=SecretStr(SECRET))
        with closing(there.open("partner")) as destination, pytest.raises(error) as caught:
            destination.store(forwarder.chunk(forwarder.messages(2)), exactly_once=True)
    assert type(caught.value) is error
    assert says in str(caught.value)
    assert len(stranger.begun) == 1


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, b'"messages": 1e999, "dropped": 0, "marks": []'),
        (200, b'"messages": 1, "dropped": 0, "marks": [["retry", 1e999, [1, 1, null, false]]]'),
        (200, b'"messages": 1, "dropped": 0, "marks": [["retry", 1, [1, 1, 5, false]]]'),
        (409, b'"error": "fenced", "shards": [1e999]'),
        (409, b'"error": "ahead", "shards": [0], "marks": [[0, 0, [1e999, 0, null, true]]]'),
        (409, b'"error": "behind", "shards": [0], "since": 5, "lower": null'),
        (409, b'"error": "unknown_service", "services": [], "rows": [1e999]'),
        (409, b'"error": "unknown_service", "services": [], "rows": [99]'),
        (409, b'"error": "another_broker", "broker": 1, "others": 5, "rows": []'),
        (409, b'"error": "unknown_service", "services": ["billing"], "rows": []'),
        (409, b'"error": "unknown_service", "services": ["nobody"], "rows": [0]'),
    ],
)
def test_whatever_a_partner_answers_about_a_chunk_no_message_is_to_blame(
    status: int, answer: bytes
) -> None:
    forwarder, stranger = Forwarder(), Partner()

    async def reply(got: Got) -> Reply:
        if b"identity" in got.body:
            return 200, {}, b'{"version": 1, "identity": "%s", "max_bytes": 100000}' % HERE
        return status, {}, b'{"version": 1, %s}' % answer

    stranger.answer = reply
    with serving(stranger):
        there = Https(server=stranger.url, secret=SecretStr(SECRET))
        with (
            closing(there.open("partner")) as destination,
            pytest.raises(Unavailable, match=r"not understood|does not list what it stored"),
        ):
            destination.store(forwarder.chunk(forwarder.messages(2)), exactly_once=True)


@pytest.mark.parametrize("drips", [True, False])
@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\ncontent-length: 100000\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
    ],
)
def test_a_server_that_drips_its_answer_is_waited_for_only_so_long(
    begun: bytes, drips: bool
) -> None:
    def drip(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(begun)
        connection.settimeout(15)  # whoever waits for longer fails, and does not hang
        end = time.monotonic() + 15
        while drips and time.monotonic() < end:
            connection.sendall(b"1")
            time.sleep(0.05)
        while connection.recv(1 << 16):
            pass

    with listening(drip) as url:
        there = Https(server=url, secret=SecretStr(SECRET))
        there = there.bounded(Bounds(statement_seconds=0.5, chunk_seconds=0.5))
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            there.identity("partner")
        assert caught.value.hangs
        assert time.monotonic() - began < 10


def test_an_answer_that_is_the_last_one_is_read_to_its_end() -> None:
    def say(connection: socket.socket) -> None:
        asked = b""
        while b'"identity"' not in asked:
            asked += connection.recv(1 << 16)
        said = b'{"version": 1, "identity": "%s", "max_bytes": 1}' % HERE
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + said[:9])
        time.sleep(0.2)
        connection.sendall(said[9:])

    with listening(say) as url:
        there = Https(server=url, secret=SecretStr(SECRET))
        for _ in range(3):
            assert there.identity("partner") == UUID(HERE.decode())


def test_its_certificate_has_to_be_of_those_that_are_trusted(mom: Dsn, tmp_path: Path) -> None:
    file, key = certificate(tmp_path)
    with broker_server(mom, certificate=(file, key)) as partner:
        with pytest.raises(Refused, match=r"the certificate of .* is not accepted"):
            partner.at().identity("partner")
        assert partner.at(ca_file=file).identity("partner")
        by_address = Https(
            server=f"https://127.0.0.1:{partner.port}/saf", secret=SecretStr(SECRET), ca_file=file
        )
        with pytest.raises(Refused, match="IP address mismatch"):
            by_address.identity("partner")
        with pytest.raises(Refused, match="its certificates cannot be read"):
            partner.at(ca_file=key).identity("partner")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"server": "http://partner.example.com/saf"}, "use https://"),
        ({"server": "ftp://partner.example.com"}, "not a URL such as https://"),
        ({"server": "https://user:secret@partner.example.com"}, "no user and password"),
        ({"server": "https://partner.example.com/?token=1"}, "nothing after"),
        ({"secret": "whsec_short"}, "a webhook's secret is whsec_"),
        ({"key_file": "key.pem"}, "belong together"),
        ({"server": "http://127.0.0.1:1", "ca_file": "ca.pem"}, "certificates need TLS"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Https(**{"server": "https://partner.example.com/saf", "secret": SECRET, **given})


def test_an_application_that_cannot_be_is_refused(mom: Dsn) -> None:
    with pytest.raises(UsageError, match="secret"):
        saf.webhooks.broker(mom, secrets=[])
    with pytest.raises(UsageError, match="secret"):
        saf.webhooks.broker(mom, secrets="secret")
    with pytest.raises(UsageError, match="broker_id"):
        saf.webhooks.broker(mom, secrets=SECRET, sources=["shop"])


# What comes is not trusted to be what it says


def test_what_is_no_chunk_is_not_understood() -> None:
    forwarder = Forwarder()
    body = bytes(body_of(forwarder.chunk(forwarder.messages(3)), store=True, exactly_once=True))
    chance = random.Random(5)
    for _ in range(sized(300, 3_000)):
        broken = bytearray(body[: chance.randrange(len(body))] if chance.random() < 0.3 else body)
        for _ in range(chance.randrange(1, 4)):
            if broken:
                broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            chunk_of(bytes(broken))
        except NotUnderstood:
            continue


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("id", None, "a row has no id"),
        ("to_service", None, "a row has no to_service"),
        ("shard", 99, "of shards that are not in its batch"),
        ("body", pa.array([1, 2], pa.int64()), "its column 'body' is int64"),
        ("message_id", "leave it out", "it has no column 'message_id'"),
    ],
)
def test_a_chunk_without_what_it_needs_is_not_understood(
    column: str, value: Any, says: str
) -> None:
    forwarder = Forwarder()
    chunk = forwarder.chunk(forwarder.messages(2))
    rows, at = chunk.rows, chunk.rows.column_names.index(column)
    if value == "leave it out":
        rows = rows.drop_columns([column])
    else:
        new = value if isinstance(value, pa.Array) else pa.array([value] * 2, TYPES[column])
        rows = rows.set_column(at, column, new)
    body = body_of(replace(chunk, rows=rows), store=True, exactly_once=True)
    with pytest.raises(NotUnderstood, match=says):
        chunk_of(bytes(body))


def stream(rows: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    how = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, rows.schema, options=how) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())


def test_what_would_take_more_memory_than_it_has_bytes_is_not_understood() -> None:
    forwarder = Forwarder()
    body = bytes(body_of(forwarder.chunk(forwarder.messages(8)), store=True, exactly_once=True))
    rows = pa.ipc.open_stream(body).read_all()
    assert chunk_of(stream(rows)).chunk.rows.num_rows == 8
    endless = pa.RecordBatch.from_arrays(
        [pa.nulls(1 << 30) for _ in TYPES], schema=pa.schema([(name, pa.null()) for name in TYPES])
    )
    few = pa.table({"key": rows["key"].dictionary_encode()})
    old = pa.ipc.MetadataVersion.V4
    for hostile, says in (
        (stream(pa.Table.from_batches([endless])), "its column 'id' is null"),
        (stream(rows.set_column(0, "id", pa.nulls(8))), "its column 'id' is null"),
        (stream(few), "its column 'key' is dictionary"),
        (stream(few.rename_columns(["more"])), "more than plain rows"),
        (stream(rows, compression="zstd"), "more than plain rows"),
        (stream(rows, compression="lz4"), "more than plain rows"),
        (stream(rows, compression="lz4", metadata_version=old), "more than plain rows"),
        (b"", "not a chunk"),
    ):
        with pytest.raises(NotUnderstood, match=says):
            chunk_of(hostile)
    with pytest.raises(NotUnderstood, match=r"its rows have .* bytes"):
        chunk_of(shared(rows))


def shared(rows: pa.Table) -> bytes:
    """A stream in which two columns have their texts where a third one, which is long, has them."""
    texts = {"key": "x" * 10_000, "headers": "{}", "message_type": "t"}
    for name, text in texts.items():
        at = rows.column_names.index(name)
        rows = rows.set_column(at, name, pa.array([text] * rows.num_rows))
    body = bytearray(stream(rows.combine_chunks()))
    _, message = pa.ipc.MessageReader.open_stream(bytes(body))
    described = bytes(message.metadata)
    # of each column: validity, then where texts begin, then the texts; each a place and a length
    sizes = [3 if pa.types.is_binary(t) or pa.types.is_string(t) else 2 for t in rows.schema.types]
    buffers = dict(zip(rows.column_names, accumulate([0, *sizes]), strict=False))
    long = described.index((10_000 * rows.num_rows).to_bytes(8, "little"))
    first = body.index(described) + long - 8 - 16 * (buffers["key"] + 2)
    begin = first + 16 * (buffers["key"] + 1)
    for name in ("headers", "message_type"):
        to = first + 16 * (buffers[name] + 1)
        body[to : to + 32] = body[begin : begin + 32]
    return bytes(body)


def test_a_chunk_arrives_as_it_was_given() -> None:
    forwarder = Forwarder()
    for lane in (None, Kind.RETRY):
        chunk = forwarder.chunk(
            forwarder.messages(5), lane=lane, prefix="again:", behind=frozenset(["a"])
        )
        given = chunk_of(bytes(body_of(chunk, store=True, exactly_once=False)))
        assert (given.store, given.exactly_once) == (True, False)
        assert given.chunk.rows.select(chunk.rows.column_names).to_pylist() == (
            chunk.rows.to_pylist()
        )
        for name in ("source", "prefix", "known", "behind"):
            assert getattr(given.chunk, name) == getattr(chunk, name)
        for name in ("number", "epochs", "opened_at"):
            assert getattr(given.chunk.batch, name) == getattr(chunk.batch, name)


# What a partner may say


def test_a_partner_vouches_for_its_own_senders_alone(mom: Dsn, partner: BrokerServer) -> None:
    forwarder = Forwarder()

    def said(broker: object) -> str:
        return json.dumps({"broker": str(broker), "service": "bank"})

    own, other = said(forwarder.source), said(uuid4())
    headers = {
        f'{{"saf-verified-from": {own}}}': "bank",
        f'{{"saf-verified-from": {other}}}': None,
        f'{{"saf-verified\\u002dfrom" : {other}, "n": 1.50}}': None,
        f'{{"saf-verified-from": {own}, "saf-verified-from":{other}}}': None,
        f'{{"saf-verified-from": {other}, "saf-verified-from":{own}}}': "bank",
        f'{{"x": {{"saf-verified-from": {other}}}}}': None,
        '{"saf-verified-from": ["bank"]}': None,
        '["saf-verified-from"]': None,
        "{}": None,
    }
    rows = [forwarder.message(headers=one) for one in headers]
    with connect(mom) as connection:
        create_service(connection, "billing")
    with closing(partner.at().open("partner")) as destination:
        destination.store(forwarder.chunk(rows), exactly_once=True)
    with saf.receive(mom, "billing") as delivery:
        found = [one.verified_from and one.verified_from.service for one in delivery]
        assert found == list(headers.values())
        claimed = [one.headers["saf-claimed-from"] for one in list(delivery)[1:4]]
        assert claimed == [json.loads(other)] * 3
        assert '"n": 1.50' in str(list(delivery)[2].headers_text)


def test_what_may_name_another_brokers_sender_and_cannot_be_read_is_rejected(
    mom: Dsn, partner: BrokerServer
) -> None:
    forwarder = Forwarder()
    deep = f'{{"saf-verified-from": {"[" * 3000}{"]" * 3000}}}'
    with closing(partner.at().open("partner")) as destination:
        chunk = forwarder.chunk([forwarder.message(headers=deep)])
        with pytest.raises(Rejected, match="headers cannot be read"):
            destination.store(chunk, exactly_once=True)
        assert ids(mom) == []


def test_slow_requests_without_a_signature_of_now_take_nobodys_place(mom: Dsn) -> None:
    forwarder = Forwarder()
    late = sign("one", int(time.time()) - 301, b"", [key_of(SECRET)])
    none = {**sign("one", int(time.time()), b"", [key_of(SECRET)]), "webhook-signature": "v1,no"}
    with broker_server(mom, options={"at_once": 1}) as partner, ExitStack() as stack:
        for headers in ({}, late, none):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", partner.port)))
            lines = ["POST /saf HTTP/1.1", "host: here", "content-length: 10"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            slow.sendall("\r\n".join([*lines, "", ""]).encode())
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 401")
        with closing(partner.at().open("partner")) as destination:
            chunk = forwarder.chunk(forwarder.messages(1))
            assert all_stored(destination.store(chunk, exactly_once=True)).messages == 1


# Two installations


def test_two_installations_converse_by_https_alone(app: Dsn, mom: Dsn) -> None:
    dialogs.prepare(app, mom)
    with broker_server(mom) as warehouse, broker_server(app) as shop:

        def converse() -> None:
            for source, there in ((app, warehouse), (mom, shop)):
                with Cycle(source, forwarding_rules(there=there.at())) as cycle:
                    drain(cycle)

        def reply(connection: psycopg.Connection[Any], message: saf.Received) -> None:
            assert message.dialog is not None
            message.dialog.send(connection, f"got {message.text()}")

        dialog = dialogs.begin(app, "an order", "and a note")
        converse()
        assert dialogs.said(dialogs.receive(mom, WAREHOUSE, reply)) == ["an order", "and a note"]
        converse()
        assert dialogs.said(dialogs.receive(app, SHOP)) == ["got an order", "got and a note"]
        dialogs.end(app, dialog)
        converse()
        (last,) = dialogs.receive(mom, WAREHOUSE)
        assert last.dialog is not None
        dialogs.end(mom, last.dialog)
        converse()
        assert dialogs.receive(app, SHOP) == []
        assert (dialogs.states(app), dialogs.states(mom)) == (["closed"], ["closed"])


def test_a_service_that_is_not_known_is_named_with_what_was_not_stored(
    mom: Dsn, partner: BrokerServer
) -> None:
    know(mom, "billing")
    forwarder = Forwarder()
    rows = [forwarder.message(), forwarder.message(to_service="nobody"), forwarder.message()]
    with closing(partner.at().open("partner")) as destination:
        forwarder.learn(destination.store(forwarder.chunk(rows[:1]), exactly_once=True))
        refusal = destination.store(forwarder.chunk(rows), exactly_once=True)
    assert isinstance(refusal, Refusal)
    assert isinstance(refusal.error, UnknownService)
    assert refusal.rows is not None
    assert [UUID(bytes=one) for one in refusal.rows["message_id"].to_pylist()] == of(rows[1:2])
