"""The entrance of a webhook inbox: how much, how many at a time, and which events are the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from saf.message import FIRST_DAY, LAST_DAY
from saf.signing.webhook import key_of, sign
from saf.webhooks import asgi
from saf.webhooks.asgi import Entrance, Full
from saf.webhooks.event import Event, NoEvent
from saf.webhooks.receiver import _digest, _moment, _uuid

SECRET = "whsec_" + "c2Vj" * 8


def scope(**headers: str) -> dict[str, Any]:
    signed = sign("7", int(time.time()), b"", [key_of(SECRET)])
    given = {name.replace("_", "-"): value for name, value in headers.items()} | signed
    return {"headers": [(name.encode(), value.encode()) for name, value in given.items()]}


def parts(*bodies: bytes) -> asgi.Receive:
    left = [
        {"type": "http.request", "body": one, "more_body": number < len(bodies)}
        for number, one in enumerate(bodies, start=1)
    ]

    async def receive() -> MutableMapping[str, Any]:
        return left.pop(0)

    return receive


def body_of(*bodies: bytes, most: int = 10, **headers: str) -> bytes:
    return asyncio.run(asgi.body_of(scope(**headers), parts(*bodies), most=most, seconds=5))


def test_a_body_has_as_many_bytes_as_are_allowed_and_not_one_more() -> None:
    assert body_of(b"1234567890") == b"1234567890"
    assert body_of(b"12345", b"67890", content_length="10") == b"1234567890"
    with pytest.raises(asgi.TooLarge):
        body_of(b"12345", b"678901")
    with pytest.raises(asgi.TooLarge):
        body_of(b"", content_length="11")


def test_a_client_that_goes_has_sent_no_body() -> None:
    async def gone() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(asgi.Gone):
        asyncio.run(asgi.body_of(scope(), gone, most=10, seconds=5))


def test_as_many_requests_have_a_place_as_are_allowed_and_a_place_is_given_back() -> None:
    async def run() -> None:
        entrance = Entrance(at_once=2, max_bytes=10, seconds=5)
        async with entrance.let_in(scope(), parts(b"1")), entrance.let_in(scope(), parts(b"2")):
            with pytest.raises(Full, match="2 requests"):
                async with entrance.let_in(scope(), parts(b"3")):
                    pass
        with pytest.raises(asgi.TooLarge):
            async with entrance.let_in(scope(), parts(bytes(11))):
                pass
        async with entrance.let_in(scope(), parts(b"4")), entrance.let_in(scope(), parts(b"5")):
            pass

    asyncio.run(run())


def test_an_event_is_known_by_its_service_its_source_and_its_id_each_by_itself() -> None:
    known = {
        _digest("billing", "/shop", "7"),
        _digest("shipping", "/shop", "7"),
        _digest("billing", "/other", "7"),
        _digest("billing", "/shop", "8"),
        _digest("billing", "/sho", "p7"),
        _digest("billing/", "shop", "7"),
        _digest("billing", "", "7"),
    }
    assert len(known) == 7


def event(number: str, source: str = "/shop") -> Event:
    return Event(id=number, source=source, type="Paid", key=None, content_type=None, body=b"")


def test_ids_of_two_sources_that_are_no_uuids_are_two_messages() -> None:
    assert _uuid(event("7")) == _uuid(event("7")) != _uuid(event("7", "/other"))
    assert _uuid(event(str(UUID(int=7)))) == UUID(int=7)


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [(FIRST_DAY, True), (FIRST_DAY - timedelta(microseconds=1), False), (None, False)],
)
def test_an_event_of_before_the_calendar_has_happened_now(said: datetime, is_kept: bool) -> None:
    moment = _moment(said and said.isoformat())
    assert (moment == said) is is_kept
    assert is_kept or datetime.now(UTC) - moment < timedelta(minutes=1)


def test_an_event_of_the_end_of_the_calendar_is_refused_from_its_first_moment_on() -> None:
    last = LAST_DAY - timedelta(microseconds=1)
    assert _moment(last.isoformat()) == last
    with pytest.raises(NoEvent):
        _moment(LAST_DAY.isoformat())


def test_a_time_without_a_zone_is_in_utc() -> None:
    assert _moment("2026-01-31T12:00:00") == datetime(2026, 1, 31, 12, tzinfo=UTC)
