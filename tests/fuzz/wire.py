"""What other programs send over HTTP and what queues give back: requests, answers, marks."""

from __future__ import annotations

import json
import math
import xmlrpc.client
from contextlib import suppress
from uuid import UUID

import pyarrow as pa
from hypothesis import strategies as st

from saf.destinations.https import wire
from saf.destinations.https.chunks import METADATA, body_of, chunk_of
from saf.destinations.mapping import MEDIA_TYPE, _own, attributes_of
from saf.errors import InvalidMessage, NotVerified, Rejected
from saf.message import Message, encode
from saf.receiving.dispatch.calls import XmlRpc
from saf.receiving.dispatch.credentials import NoToken, parsed
from saf.receiving.dispatch.replies import retry_after
from saf.signing import webhook
from saf.testing.forwarder import Forwarder
from saf.webhooks.event import NoEvent, event
from saf.webhooks.receiver import _moment, _uuid
from tests.fuzz.target import Target, documents, encoded, nearly, values

ATTRIBUTES = (
    "specversion",
    "id",
    "source",
    "type",
    "time",
    "subject",
    "partitionkey",
    "datacontenttype",
    "data",
    "data_base64",
)
EVENT = json.dumps(
    {
        "specversion": "1.0",
        "id": "7",
        "source": "/shop",
        "type": "Paid",
        "time": "2026-01-31T12:00:00Z",
        "datacontenttype": "application/json",
        "data": {"order": [1, 2.5, None, "ü"]},
    }
).encode()
CALLED = xmlrpc.client.dumps(({"a": [1, 2.5, "x"]},), methodresponse=True).encode()
FAULT = xmlrpc.client.dumps(xmlrpc.client.Fault(7, "no order")).encode()
TOKEN = b'{"access_token": "abc", "token_type": "Bearer", "expires_in": 60}'
FORWARDER = Forwarder()
CHUNK = bytes(body_of(FORWARDER.chunk(FORWARDER.messages(3)), store=True, exactly_once=True))
SAID = json.loads(pa.ipc.open_stream(CHUNK).schema.metadata[METADATA])
DATES = st.text(max_size=40) | nearly(b"Sat, 31 Jan 2026 12:00:30 GMT").map(
    lambda text: text.decode(errors="replace")
)


def take(given: tuple[dict[str, str], bytes]) -> None:
    """As the receiver of webhooks does with a request whose signature is right."""
    headers, body = given
    try:
        one = event(headers, body)
        row = encode(
            Message(
                service="billing",
                body=one.body,
                key=one.key,
                message_type=one.type,
                headers=dict(one.headers),
            )
        )
    except (NoEvent, InvalidMessage):
        return
    for text in (row.key, row.message_type, row.headers):
        assert text is None or "\0" not in text
        assert text is None or text.encode()
    assert _moment(one.headers.get("time")).utcoffset() is not None
    assert isinstance(_uuid(one), UUID)


def check_signature(given: tuple[str, str, str, bytes]) -> None:
    number, moment, signatures, body = given
    headers = {webhook.ID: number, webhook.TIMESTAMP: moment, webhook.SIGNATURE: signatures}
    with suppress(NotVerified):
        webhook.verify(headers, body, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        raise AssertionError("a stranger has signed it")


def understand(body: bytes) -> None:
    with suppress(wire.NotUnderstood):
        wire.read(body)
    with suppress(wire.NotUnderstood):
        chunk_of(body)


def with_said(said: object) -> bytes:
    """The chunk, with something else in place of what is said beside its rows."""
    rows = pa.ipc.open_stream(CHUNK).read_all()
    rows = rows.replace_schema_metadata({METADATA: json.dumps(said)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue())


def answer(body: bytes) -> None:
    call = XmlRpc("order")
    for status in (200, 500):
        said = call.fault(status, body)
        assert said is None or isinstance(said, str)
    if call.fault(200, body) is None:
        json.loads(call.result(body))
    with suppress(NoToken):
        token, seconds = parsed(body)
        assert token.isascii()
        assert math.isfinite(seconds)


def wait(text: str) -> None:
    seconds = retry_after({"Retry-After": text})
    assert seconds is None or seconds >= 0


def map_headers(given: tuple[str, bytes]) -> None:
    text, body = given
    with suppress(Rejected):
        assert all(isinstance(one, str) for one in _own("orders", text, set()).values())
    attributes_of({"content-type": MEDIA_TYPE}, body)


NAMES = ["content-type", *(f"ce-{name}" for name in ATTRIBUTES)]
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["1.0", "application/cloudevents+json", "application/json", "%00", "%ED%A0%80", "2026-01-31"]
)
EVENTS = {"content-type": "application/cloudevents+json"}
BINARY = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "Paid"}

TARGETS = (
    Target(
        name="webhook",
        given=st.tuples(st.just(EVENTS), encoded(documents(*ATTRIBUTES)) | nearly(EVENT))
        | st.tuples(
            st.dictionaries(st.sampled_from(NAMES), TEXTS).map(lambda own: BINARY | own),
            st.binary(max_size=20),
        ),
        check=take,
    ),
    Target(
        name="webhook signature",
        given=st.tuples(st.text(), st.text(), st.text(), st.binary()),
        check=check_signature,
    ),
    Target(
        name="chunk",
        given=nearly(CHUNK)
        | encoded(documents("version", "ask"))
        | st.dictionaries(st.sampled_from([*SAID]), values(st.text(max_size=8))).map(
            lambda other: with_said(SAID | other)
        ),
        check=understand,
        found=(with_said(SAID | {"source": []}),),
    ),
    Target(
        name="answer",
        given=nearly(CALLED)
        | nearly(FAULT)
        | nearly(TOKEN)
        | encoded(documents("access_token", "expires_in")),
        check=answer,
        found=(
            b"[" * 2500,
            b'{"access_token": "a", "expires_in": 1%s}' % (b"0" * 400),
            b'{"access_token": "a", "expires_in": NaN}',
        ),
    ),
    Target(name="retry after", given=DATES, check=wait),
    Target(
        name="queue",
        given=st.tuples(documents("a", "content-type"), encoded(documents("id", "data"))),
        check=map_headers,
    ),
)
