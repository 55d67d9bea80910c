"""What a sender writes: headers and bodies, of dialogs too, as receivers read them."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from saf.config import Ui
from saf.dialogs.assembly import is_fragment, whole
from saf.dialogs.contracts import MessageType
from saf.dialogs.facts import Facts
from saf.engine.transforming import written
from saf.errors import SchemaViolation, UnreadableBody, UnreadableHeaders
from saf.message import STRICT
from saf.received import READ, Received
from saf.receiving.dispatch import envelope
from saf.receiving.dispatch.calls import XmlRpc
from saf.signing.verifier import Refusal, Trust, Verifier
from saf.spark.table.fields import members
from saf.telemetry.carried import carrier_of, context_of
from saf.ui.redaction import Redaction
from tests.fuzz.target import Target, documents, encoded
from tests.signing import key

NAMES = (
    "content-type",
    "saf-verified-from",
    "saf-signature",
    "saf-fragment",
    "saf-whole",
    "fragments",
    "bytes",
    "broker",
    "service",
    "traceparent",
    "tracestate",
    "baggage",
)
TYPES = [None, "application/json", "text/plain", "a/b; charset=\0", "application/x+json", "\ud800"]
REDACTION = Redaction(Ui(redact_headers=("auth*",), redact_paths=("$..password", "$.a[0].b")))
SCHEMA = json.dumps({"type": "object", "properties": {"code": {"type": "integer"}}})


def message(headers: str | None = None, body: bytes = b"", **columns: Any) -> Received:
    """A message as a receiver reads it."""
    known: dict[str, Any] = {
        "id": 7,
        "shard": 3,
        "message_id": UUID(int=7).bytes,
        "to_service": "billing",
        "headers": headers,
        "body": body,
        "created_at": datetime.now(UTC),
    } | columns
    return Received(tuple(known.get(column) for column in READ))


def read_headers(text: str) -> None:
    one = message(text, from_initiator=True, sequence=4)
    with suppress(UnreadableHeaders):
        assert isinstance(one.headers, object)
    with suppress(UnreadableHeaders, ValueError):
        assert one.verified_from is None or one.verified_from.service
    assert one.content_type is None or isinstance(one.content_type, str)
    with suppress(UnreadableHeaders):
        is_fragment(one)
        assert whole(one) is None or len(whole(one) or ()) == 2


def read_traces(text: str) -> None:
    assert all(value.isascii() for value in carrier_of(text).values())
    context_of(text)


def verify(text: str) -> None:
    trust = Trust.of({"shop-1": key()}, required=True)
    assert trust is not None
    said = Verifier(trust=trust, broker=UUID(int=1))(message(text, b"7", from_service="shop"))
    assert isinstance(said, Refusal)


def read_body(body: bytes) -> None:
    one = message('{"content-type": "application/json"}', body)
    for read in (one.json, one.text):
        with suppress(UnreadableBody):
            read()
    for validation in ("json", "json_schema", "empty"):
        kind = MessageType(
            name="Paid",
            version=1,
            sent_by="any",
            validation=validation,
            schema=SCHEMA if validation == "json_schema" else None,
        )
        with suppress(SchemaViolation):
            kind.check(body)
    facts = Facts().with_error(body)
    assert facts.error_code is not None
    assert -(2**31) <= facts.error_code < 2**31
    with suppress(UnreadableBody):
        XmlRpc("order").request(one)


def show(given: tuple[str, bytes]) -> None:
    headers, body = given
    for text in (*REDACTION.headers(headers).values(), REDACTION.body(body, headers)):
        text.encode()


def as_event(given: tuple[str | None, bytes]) -> None:
    kind, body = given
    # a number in a body may have more digits than Python reads
    said = STRICT.decode(envelope.structured({"id": "1"}, kind, body).decode())
    assert "data" in said or "data_base64" in said


def as_map(text: str) -> None:
    """As Spark reads what PostgreSQL has written: valid JSON in its form."""
    try:
        said = json.loads(text)
        rewritten = json.dumps(said, ensure_ascii=False)
        rewritten.encode()
    except (ValueError, RecursionError):
        return
    found = members(rewritten)
    assert (found is None) == (not isinstance(said, dict))
    assert found is None or [name for name, _ in found] == [*said]


def as_given(text: str) -> None:
    """As a transform gives headers: what is kept is on one line, and stays as it is."""
    try:
        said = written(text)
    except (ValueError, RecursionError):
        return
    assert "\n" not in said
    assert written(said) == said
    assert members(said) is not None


TARGETS = (
    Target(name="headers", given=documents(*NAMES), check=read_headers),
    Target(name="traces", given=documents(*NAMES), check=read_traces),
    Target(name="signature", given=documents(*NAMES), check=verify),
    Target(name="body", given=encoded(documents("code", "text")), check=read_body),
    Target(
        name="redaction",
        given=st.tuples(documents("Authorization", "a"), encoded(documents("password", "a", "b"))),
        check=show,
        found=(("{}", b"[" * 200 + b"]" * 200),),
    ),
    Target(
        name="envelope",
        given=st.tuples(st.sampled_from(TYPES), encoded(documents())),
        check=as_event,
    ),
    Target(name="map", given=documents(), check=as_map),
    Target(name="transform headers", given=documents(*NAMES), check=as_given),
)
