"""What every queue keeps in the format ``cloudevents-structured``, with a real server.

A subclass names its kind's settings, and what its server holds; events are read by the library of
CloudEvents. `saf.testing.conformance` has what does not depend on the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, TypeAlias

import pytest
from cloudevents.core.bindings import amqp, kafka
from cloudevents.core.formats.json import JSONFormat

from saf.destinations.mapping import HEADERS
from saf.destinations.settings import DestinationSettings
from saf.errors import Rejected
from saf.testing.conformance import DestinationConformance
from saf.testing.forwarder import DIALOG, HARD, Forwarder

Found: TypeAlias = Callable[[], Sequence[tuple[Mapping[str, str], bytes]]]
"""The headers and bodies of all messages, oldest first."""

JSON_BODY = b'{"n": 1.50,\n "deep": [null, "\xc3\xbc"]}'
BODIES: Mapping[str, tuple[str | None, bytes, object]] = {
    "JSON": ("application/json", JSON_BODY, json.loads(JSON_BODY)),
    "JSON of a type of its own": ("application/vnd.x+json; charset=utf-8", b"[1]", [1]),
    "JSON, but not quite": ("application/json", b'{"n": NaN}', b'{"n": NaN}'),
    "JSON, but for the rest": ("application/json", b"{} {}", b"{} {}"),
    "text": ("text/plain; charset=utf-8", 'say "grüezi"\n'.encode(), 'say "grüezi"\n'),
    "no text": ("text/plain", b"\xff\x00", b"\xff\x00"),
    "bytes": ("image/png", b"\x89PNG", b"\x89PNG"),
    "nobody knows what": (None, b"{}", b"{}"),
}
"""A content type, a body, and the data of the event."""


def by_kafka(headers: Mapping[str, str], body: bytes) -> Any:
    """The event, by the binding for Kafka, which also reads what has headers only."""
    given: Any = {name: value.encode() for name, value in headers.items()}
    message = kafka.KafkaMessage(headers=given, key=None, value=body)
    return kafka.from_structured_event(message, JSONFormat())


def by_amqp(headers: Mapping[str, str], body: bytes) -> Any:
    """The event, by the binding for AMQP."""
    given = amqp.AMQPMessage(
        properties={"content-type": headers["content-type"]},
        application_properties=dict(headers),
        application_data=body,
    )
    return amqp.from_amqp_event(given, JSONFormat())


class WholeEventsSuite:
    """A subclass gives `settings`, `found`, and maybe `binding`."""

    binding = staticmethod(by_kafka)

    @pytest.fixture
    def settings(self) -> DestinationSettings:
        """A destination in this format, which stores a few messages at a time."""
        raise NotImplementedError("give the fixture `settings`")

    @pytest.fixture
    def found(self) -> Found:
        """What the server holds."""
        raise NotImplementedError("give the fixture `found`")

    def test_the_library_of_cloud_events_reads_all_that_a_message_says(
        self, settings: DestinationSettings, found: Found
    ) -> None:
        forwarder = Forwarder()
        hard = [one for name, one in HARD.items() if name != DIALOG]
        rows = [forwarder.message(**columns) for columns in [*hard, HARD[DIALOG]]]
        wanted: list[object] = [row["body"] for row in rows]
        for content_type, body, data in BODIES.values():
            own = {"trace": "x", **({"content-type": content_type} if content_type else {})}
            rows.append(forwarder.message(body=body, headers=json.dumps(own), shard=1))
            wanted.append(data)
        with closing(settings.open("events")) as destination:
            once = settings.capabilities.exactly_once
            destination.store(forwarder.chunk(rows), exactly_once=once)
        there = found()
        events = [self.binding(*one) for one in there]
        assert [event.get_data() for event in events] == wanted
        for event, row in zip(events, rows, strict=True):
            said = event.get_attributes()
            for header in HEADERS:
                if header.column != "source":
                    assert _value(said.get(header.event)) == _value(_given(row, header.column))
            assert said["source"] == f"urn:uuid:{forwarder.source}"
        for (headers, body), event, (content_type, sent, _) in zip(
            there[-len(BODIES) :], events[-len(BODIES) :], BODIES.values(), strict=True
        ):
            assert event.get_datacontenttype() == content_type
            assert headers["trace"] == "x"
            assert sent != JSON_BODY or JSON_BODY in body

    def test_what_it_holds_can_be_compared(self, settings: DestinationSettings) -> None:
        DestinationConformance().test_what_it_holds_can_be_compared(settings, Forwarder())


class LimitedWholeEventsSuite(WholeEventsSuite):
    """The same, where the server says how large a message may be; a subclass gives `too_large`."""

    @pytest.fixture
    def too_large(self) -> int:
        """The size of a body that the server takes, but not in base64."""
        raise NotImplementedError("give the fixture `too_large`")

    def test_one_that_is_too_large_as_an_event_is_rejected_and_nothing_stored(
        self, settings: DestinationSettings, found: Found, too_large: int
    ) -> None:
        forwarder = Forwarder()
        row = forwarder.message(body=b"\xff" * too_large)
        with closing(settings.open("events")) as destination:
            with pytest.raises(Rejected, match="bytes"):
                destination.store(forwarder.chunk([row]), exactly_once=True)
            assert found() == []
            row["headers"], row["body"] = '{"content-type": "text/plain"}', b"x" * too_large
            destination.store(forwarder.chunk([row]), exactly_once=True)
        assert len(found()) == 1


def _given(row: Mapping[str, Any], column: str) -> Any:
    return row[column] or row["to_service"] if column == "message_type" else row[column]


def _value(value: Any) -> str | None:
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
    return None if value is None else str(value)
