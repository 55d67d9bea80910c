"""HTTP/2: many requests over one connection, and what may happen to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from saf.database import Dsn, fetch
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.replies import Answer, Meaning
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.transport import PRIVATE_REFUSED
from tests.endpoints import Got, Partner, Reply, behind_nginx, dispatch, listening, serving
from tests.pipeline import connect
from tests.receivers import prepare, store


@pytest.fixture
def partner() -> Iterator[Partner]:
    with serving(Partner()) as one:
        yield one


def post(endpoint: Endpoint, times: int = 1, body: bytes = b"{}") -> list[Answer]:
    """Some requests, all at once."""

    async def work() -> list[Answer]:
        async with Client(endpoint) as client:
            some = [Request(message_id=str(n), headers={}, body=body) for n in range(times)]
            return await asyncio.gather(*map(client.post, some))

    return asyncio.run(work())


def http2(partner: Partner, certificate: Path, **more: Any) -> Endpoint:
    return Endpoint(url=partner.url, ca_file=certificate, http2=True, **more)


def versions(partner: Partner) -> set[str]:
    return {got.headers["x-version"] for got in partner.accepted}


def connections(partner: Partner) -> int:
    return len({got.headers["x-connection"] for got in partner.accepted})


def test_requests_share_a_connection(partner: Partner, tmp_path: Path) -> None:
    partner.after(0.05)
    with behind_nginx(partner, tmp_path) as certificate:
        answers = post(http2(partner, certificate, bearer=SecretStr("a token")), times=200)
    assert {answer.meaning for answer in answers} == {Meaning.DONE}
    assert versions(partner) == {"HTTP/2.0"}
    assert {got.headers["authorization"] for got in partner.accepted} == {"Bearer a token"}
    assert connections(partner) == 1
    assert partner.most_in_flight > 10


def test_an_endpoint_without_it_gets_http_1(partner: Partner, tmp_path: Path) -> None:
    with behind_nginx(partner, tmp_path, http2=False) as certificate:
        answers = post(http2(partner, certificate), times=20)
    assert {answer.meaning for answer in answers} == {Meaning.DONE}
    assert versions(partner) == {"HTTP/1.1"}


def test_a_connection_that_is_ended_after_some_requests_costs_no_attempt(
    mom: Dsn, partner: Partner, tmp_path: Path
) -> None:
    partner.after(0.01)
    prepare(mom)
    store(mom, keys=10, each=40)
    with behind_nginx(partner, tmp_path, requests=100) as certificate:
        done = dispatch(mom, partner, ca_file=certificate, http2=True)
    assert (done.summary.handled, done.summary.exit_code) == (400, 0)
    with connect(mom) as connection:
        assert fetch(connection, "SELECT * FROM saf.backoff") == []
    assert connections(partner) >= 4


def test_a_dispatcher_keeps_the_order_of_each_key(
    mom: Dsn, partner: Partner, tmp_path: Path
) -> None:
    prepare(mom)
    store(mom, keys=20, each=10)
    partner.after(0.005)
    with behind_nginx(partner, tmp_path) as certificate:
        done = dispatch(mom, partner, ca_file=certificate, http2=True)
    assert partner.by_key() == {f"k{k}": list(range(1, 11)) for k in range(1, 21)}
    assert (done.summary.handled, done.summary.exit_code) == (200, 0)
    assert versions(partner) == {"HTTP/2.0"}


def test_of_a_long_answer_a_part_is_read(tmp_path: Path) -> None:
    sent = 0

    async def talk(_: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 503, "headers": []})
        while sent < 1000 << 20 and not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            sent += 1 << 20
            await asyncio.sleep(0)
        await gone

    with serving(Partner(), talk) as one, behind_nginx(one, tmp_path) as certificate:
        (answer,) = post(http2(one, certificate, timeout_seconds=60))
    assert (answer.meaning, answer.status) == (Meaning.WAITS, 503)
    assert len(answer.error) < 300
    assert sent < 200 << 20


def test_a_request_ends_when_its_time_is_over(partner: Partner, tmp_path: Path) -> None:
    partner.after(60)
    with behind_nginx(partner, tmp_path) as certificate:
        (answer,) = post(http2(partner, certificate, timeout_seconds=0.5))
    assert (answer.meaning, answer.error) == (Meaning.WAITS, "no answer within 0.5 s")


def test_answers_that_come_too_late_hold_nothing_up(partner: Partner, tmp_path: Path) -> None:
    late = 24

    async def answer(got: Got) -> Reply:
        if int(got.id) >= late:
            return 200, {}, bytes(1000)
        await asyncio.sleep(1)
        return 200, {}, bytes(2_000_000)

    partner.answer = answer

    async def work(endpoint: Endpoint) -> list[Answer]:
        async with Client(endpoint) as client:

            async def one(number: int) -> Answer:
                headers = {"Idempotency-Key": str(number)}
                return await client.post(Request(message_id="x", headers=headers, body=b"{}"))

            some = await asyncio.gather(*map(one, range(late)))
            await asyncio.sleep(1)
            return [*some, *[await one(late + n) for n in range(4)]]

    with behind_nginx(partner, tmp_path) as certificate:
        answers = asyncio.run(work(http2(partner, certificate, timeout_seconds=0.5)))
    assert {one.error for one in answers[:late]} == {"no answer within 0.5 s"}
    assert {one.meaning for one in answers[late:]} == {Meaning.DONE}


def test_a_connection_that_gets_no_more_requests_stays_open_for_those_in_flight(
    partner: Partner, tmp_path: Path
) -> None:
    async def answer(got: Got) -> Reply:
        if got.body == b"long":
            return 503, {}, bytes(1_000_000)
        await asyncio.sleep(1)
        return 204, {}, b""

    partner.answer = answer

    async def work(endpoint: Endpoint) -> list[Answer]:
        async with Client(endpoint) as client:
            some = [Request(message_id="x", headers={}, body=body) for body in (b"slow", b"long")]
            return await asyncio.gather(*map(client.post, some))

    with behind_nginx(partner, tmp_path) as certificate:
        slow, long = asyncio.run(work(http2(partner, certificate)))
    assert (slow.meaning, long.meaning) == (Meaning.DONE, Meaning.WAITS)
    assert sorted(got.body for got in partner.begun) == [b"long", b"slow"]


def test_a_large_body_arrives_whole(partner: Partner, tmp_path: Path) -> None:
    with behind_nginx(partner, tmp_path) as certificate:
        (answer,) = post(http2(partner, certificate), body=bytes(5_000_000))
    assert answer.meaning is Meaning.DONE
    assert [len(got.body) for got in partner.accepted] == [5_000_000]


def test_what_is_no_answer_is_said_in_one_line(partner: Partner, tmp_path: Path) -> None:
    with behind_nginx(partner, tmp_path):
        (answer,) = post(Endpoint(url=partner.url, http2=True))
        assert answer.error.startswith("its certificate is refused: ")
        (answer,) = post(Endpoint(url=partner.url, http2=True, public_only=True))
        assert answer.error == f"cannot connect: {PRIVATE_REFUSED}"
    (answer,) = post(Endpoint(url=partner.url, http2=True))
    assert answer.error == "cannot connect: Connection refused"

    def say_nothing(connection: socket.socket) -> None:
        while connection.recv(65536):
            pass

    with listening(say_nothing) as url:
        endpoint = Endpoint(url=url.replace("http:", "https:"), http2=True, connect_seconds=0.5)
        (answer,) = post(endpoint)
    assert answer.error == "cannot connect within 0.5 s"


@pytest.mark.parametrize("to", ["/ü", "https://localhost:bad/", "https://localhost:99999/"])
def test_a_redirect_to_what_is_no_url_is_no_answer(
    partner: Partner, tmp_path: Path, to: str
) -> None:
    partner.always(307, location=to)
    with behind_nginx(partner, tmp_path) as certificate:
        (answer,) = post(http2(partner, certificate, follow_redirects=True))
    assert answer.meaning is Meaning.WAITS
    assert answer.error.startswith("no answer: ")
