"""Traces: what is sent in one goes on in it, wherever it gets to; and nothing else changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from structlog.testing import capture_logs

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.message import MAX_HEADERS, Message, check_headers, encode
from saf.telemetry.carried import LARGE, LONGEST, _say, carrier_of, context_of, with_context
from saf.telemetry.tracing import MOST_LINKS, MOST_LOOKED_AT, SCHEMA, forwarding, trace_ids
from tests.dialogs import SHOP, begin
from tests.dialogs import receive as hear
from tests.endpoints import Got, Partner, Reply, dispatch, serving
from tests.hub import DEPARTURES, Hub
from tests.pipeline import connect, forward
from tests.processors import Counter, prepare_processors
from tests.receivers import SUBSCRIPTION, put

SENDER = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{SENDER}-00f067aa0ba902b7-01"
OTHER = f"00-{'a' * 32}-{'b' * 16}-01"

Connection = psycopg.Connection[Any]


class Recorded:
    """The spans of this process."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def all(self, begins: str = "") -> list[ReadableSpan]:
        return [one for one in self.exporter.get_finished_spans() if one.name.startswith(begins)]

    def one(self, begins: str) -> ReadableSpan:
        (found,) = self.all(begins)
        return found


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", recorded.provider)
    yield recorded
    for one in recorded.all():
        assert one.instrumentation_scope is not None
        if one.instrumentation_scope.name == "saf":
            assert one.instrumentation_scope.schema_url == SCHEMA


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare_processors(mom)
    return mom


def identity(span: ReadableSpan) -> trace.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def trace_id(span: ReadableSpan) -> str:
    return trace.format_trace_id(identity(span).trace_id)


def carried(dsn: Dsn, log: str = "outbox") -> list[dict[str, Any]]:
    """The headers of all messages, in their order."""
    with connect(dsn) as connection:
        return [one for (one,) in fetch(connection, f"SELECT headers FROM saf.{log} ORDER BY id")]


def put_traced(inbox: Dsn, *bodies: str, traceparent: Any = PARENT, **columns: Any) -> None:
    more = columns.pop("headers", {})
    headers = json.dumps({"traceparent": traceparent, **more})
    put(inbox, *bodies, headers=headers, **columns)


def sent(dsn: Dsn, **options: Any) -> UUID:
    with dsn.connect(role="test") as connection:
        return saf.Outbox().send(connection, SUBSCRIPTION, "x", **options)


# What a message carries


def test_a_message_carries_the_context_in_which_it_is_sent(app: Dsn, spans: Recorded) -> None:
    token = context.attach(baggage.set_baggage("tenant", "acme ü"))
    with spans.provider.get_tracer("shop").start_as_current_span("request"):
        sent(app)
        with app.connect(role="test") as connection:
            saf.Outbox().send_many(connection, [Message(service=SUBSCRIPTION, body="y")])
    context.detach(token)
    now = identity(spans.one("request"))
    expected = f"00-{now.trace_id:032x}-{now.span_id:016x}-{now.trace_flags:02x}"
    for headers in carried(app):
        assert headers["content-type"] == "text/plain; charset=utf-8"
        assert headers["traceparent"] == expected
        assert headers["baggage"] == "tenant=acme+%C3%BC"


def test_a_message_that_is_awaited_carries_the_context_of_its_task(
    app: Dsn, spans: Recorded
) -> None:
    async def request() -> None:
        with spans.provider.get_tracer("shop").start_as_current_span("request"):
            async with await psycopg.AsyncConnection.connect(app.conninfo) as connection:
                await saf.Outbox().asend(connection, SUBSCRIPTION, "x")

    asyncio.run(request())
    assert trace_id(spans.one("request")) in carried(app)[0]["traceparent"]


def test_without_a_context_nothing_is_carried(app: Dsn, spans: Recorded) -> None:
    sent(app)
    assert carried(app) == [{"content-type": "text/plain; charset=utf-8"}]
    assert spans.all() == []


def test_a_trace_that_is_not_sampled_is_carried_as_such(app: Dsn) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    with provider.get_tracer("shop").start_as_current_span("request"):
        sent(app)
    (headers,) = carried(app)
    assert not int(headers["traceparent"][-2:], 16) & trace.TraceFlags.SAMPLED


def test_headers_that_the_application_gives_win(app: Dsn, spans: Recorded) -> None:
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    with spans.provider.get_tracer("shop").start_as_current_span("request"):
        sent(app, headers={"TraceParent": OTHER})
        sent(app, headers={"baggage": "mine=1"})
        sent(app, headers={"tracestate": "a=b"})
    context.detach(token)
    by_name, by_baggage, by_state = carried(app)
    assert "traceparent" not in by_name
    assert by_name["TraceParent"] == OTHER
    assert by_name["baggage"] == "tenant=acme"
    assert by_baggage["baggage"] == "mine=1"
    assert trace_id(spans.one("request")) in by_baggage["traceparent"]
    assert "traceparent" not in by_state


def test_no_context_makes_a_message_too_large_or_no_text(spans: Recorded) -> None:
    tokens = [
        context.attach(baggage.set_baggage(name, "v" * 4000)) for name in ("a", "b", "\ud800")
    ]
    try:
        with spans.provider.get_tracer("shop").start_as_current_span("request"):
            for size in (0, LARGE - 100, LARGE, MAX_HEADERS - 100):
                headers = {"mine": "x" * size}
                row = encode(Message(service="billing", body="", headers=headers))
                assert json.loads(row.headers)["mine"] == headers["mine"]
                check_headers(row.headers)
            longest = [1e300] * (LARGE // 7)
            row = encode(Message(service="billing", body="", headers={"mine": longest}))
            check_headers(row.headers)
    finally:
        for token in reversed(tokens):
            context.detach(token)


def test_the_propagators_of_the_process_are_used(
    app: Dsn, spans: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", CompositePropagator([]))
    with spans.provider.get_tracer("shop").start_as_current_span("request"):
        sent(app)
    assert "traceparent" not in carried(app)[0]
    assert context_of(json.dumps({"traceparent": PARENT})) is None


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=5,
) | st.text(alphabet="0123456789abcdef-,;=% \t\r\n", max_size=80)


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("traceparent", "Tracestate", "baggage"), HOSTILE)
    )
)
def test_whatever_headers_hold_nothing_raises(headers: dict[str, Any]) -> None:
    text = json.dumps(headers)
    found = context_of(text)
    if found is not None:
        assert with_context(text, headers)
    for value in carrier_of(text).values():
        assert value.isprintable()


@pytest.mark.parametrize(
    "headers",
    [
        None,
        "",
        "null",
        '"traceparent"',
        '["traceparent"]',
        '{"traceparent": 7}',
        '{"traceparent": null, "baggage": {"a": 1}}',
        json.dumps({"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"}),
        json.dumps({"traceparent": PARENT + "\nX-Evil: 1"}),
        json.dumps({"traceparent": " " * LONGEST + PARENT}),
        json.dumps({"baggage": "a=" + "b" * LONGEST}),
        '{"traceparent": ' + "[" * 100_000,
    ],
)
def test_a_malformed_context_is_none(headers: str | None) -> None:
    assert context_of(headers) is None


@pytest.mark.parametrize("value", [7, None, ["a"], "a" * (LONGEST + 1), "a\nb", "ü", "a\0"])
def test_a_header_that_is_no_plain_text_is_not_given_to_opentelemetry(value: object) -> None:
    assert carrier_of(json.dumps({"baggage": value, "tracestate": "a=1"})) == {"tracestate": "a=1"}


# Forwarding


def test_a_chunk_is_a_span_that_links_to_its_messages_and_changes_none(
    app: Dsn, inbox: Dsn, spans: Recorded
) -> None:
    for traceparent in (PARENT, OTHER, "hostile", None):
        headers = {} if traceparent is None else {"traceparent": traceparent}
        sent(app, headers={**headers, "mine": 1})
    before = carried(app)
    forward(app, mom=inbox)
    assert carried(inbox, "inbox") == before
    span = spans.one("send")
    assert (span.name, span.kind, span.parent) == ("send mom", trace.SpanKind.CLIENT, None)
    assert said(span)["messaging.batch.message_count"] == 4
    linked = [trace.format_trace_id(one.context.trace_id) for one in span.links]
    assert linked == [SENDER, "a" * 32]
    with connect(app) as connection:
        ids = fetch(connection, "SELECT message_id::text FROM saf.outbox ORDER BY id LIMIT 2")
    assert [tuple((one.attributes or {}).values()) for one in span.links] == ids


def test_links_are_bounded(app: Dsn, inbox: Dsn, spans: Recorded) -> None:
    with app.connect(role="test") as connection:
        plain = [Message(service=SUBSCRIPTION, body="x")] * 50
        traced = Message(service=SUBSCRIPTION, body="x", headers={"traceparent": PARENT})
        saf.Outbox().send_many(connection, [*plain, *[traced] * (2 * MOST_LINKS)])
    forward(app, mom=inbox)
    assert len(spans.one("send").links) == MOST_LINKS


def test_of_a_large_chunk_some_messages_are_looked_at_all_over_it(spans: Recorded) -> None:
    count = 3 * MOST_LOOKED_AT + 1
    headers = [json.dumps({"traceparent": OTHER} if at > count - 10 else {}) for at in range(count)]
    with forwarding("mom", pa.table({"message_id": [b"0" * 16] * count, "headers": headers})):
        pass
    assert 1 <= len(spans.one("send").links) < 9


def test_without_a_span_that_is_recorded_no_header_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(sampler=ALWAYS_OFF))
    read = []

    class Rows:
        def __len__(self) -> int:
            return 1

        def select(self, columns: list[str]) -> pa.Table:
            read.extend(columns)
            return pa.table({name: [None] for name in columns})

    with forwarding("mom", Rows()):
        pass
    assert read == []


class Raising(TextMapPropagator):
    """A propagator of somebody's that is broken."""

    def extract(self, *_: Any, **__: Any) -> context.Context:
        raise TypeError("card 4111")

    def inject(self, *_: Any, **__: Any) -> None:
        raise TypeError("card 4111")

    @property
    def fields(self) -> set[str]:
        return {"traceparent"}


@pytest.mark.parametrize(
    "propagator",
    [CompositePropagator([]), W3CBaggagePropagator(), Raising()],
    ids=["none", "baggage", "broken"],
)
def test_whatever_the_propagators_are_messages_are_sent_forwarded_and_handled(
    app: Dsn,
    inbox: Dsn,
    spans: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    propagator: TextMapPropagator,
) -> None:
    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", propagator)
    _say.cache_clear()
    with capture_logs() as logs:
        for _ in range(2):
            sent(app, headers={"traceparent": PARENT})
        with spans.provider.get_tracer("shop").start_as_current_span("request"):
            sent(app)
        forward(app, mom=inbox)
        assert len(handled(inbox)) == 3
    assert said(spans.one("send"))["messaging.batch.message_count"] == 3
    failed = [one for one in logs if one["event"] == "tracing_failed"]
    assert len(failed) == isinstance(propagator, Raising)
    assert "card 4111" not in str(logs)


def test_a_destination_that_fails_is_a_span_with_the_type_of_the_error(
    app: Dsn, spans: Recorded
) -> None:
    sent(app)
    forward(app, mom=Dsn("host=/nonexistent dbname=gone password=hush"))
    for span in spans.all("send"):
        assert span.status.status_code is trace.StatusCode.ERROR
        assert said(span)["error.type"] == "saf.errors.Unavailable"
        assert "hush" not in span.to_json()
    assert spans.all("send")


# Receiving


def handled(inbox: Dsn, *, fails: bool = False, batch: bool = False, **options: Any) -> list[str]:
    """What a worker's handler sees: its trace, and its baggage."""
    worker = saf.Worker(inbox, SUBSCRIPTION, **options)
    seen: list[str] = []

    def note() -> None:
        now = trace.get_current_span().get_span_context()
        seen.append(f"{trace.format_trace_id(now.trace_id)} {dict(baggage.get_all())}")
        if fails:
            raise ValueError("card 4111")

    if batch:

        @worker.batch_handler()
        def several(_: object, __: object) -> None:
            note()

    else:

        @worker.handler()
        def one(_: object, __: object) -> None:
            note()

    worker.drain()
    return seen


def test_a_handler_works_in_the_trace_of_its_message_with_its_baggage(
    inbox: Dsn, spans: Recorded
) -> None:
    put_traced(inbox, "x", headers={"baggage": "tenant=acme"}, message_type="Placed")
    put(inbox, "y")
    first, second = handled(inbox)
    assert first == f"{SENDER} {{'tenant': 'acme'}}"
    assert SENDER not in second
    assert second.endswith(" {}")
    span, alone = spans.all("process")
    assert (span.name, span.kind) == ("process billing", trace.SpanKind.CONSUMER)
    assert parent(span) == int("00f067aa0ba902b7", 16)
    assert alone.parent is None
    expected = {
        "messaging.system": "saf",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": SUBSCRIPTION,
        "messaging.destination.subscription.name": SUBSCRIPTION,
        "messaging.message.body.size": 1,
        "saf.message.attempt": 1,
        "saf.message.type": "Placed",
    }
    assert said(span).items() >= expected.items()
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_what_a_handler_sends_goes_on_with_the_trace(inbox: Dsn, spans: Recorded) -> None:
    put_traced(inbox, "x")
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.handler()
    def handle(_: object, connection: Connection) -> None:
        saf.Outbox().send(connection, "next", "y")

    worker.drain()
    now = identity(spans.one("process"))
    assert carried(inbox) == [
        {
            "content-type": "text/plain; charset=utf-8",
            "traceparent": f"00-{SENDER}-{now.span_id:016x}-01",
        }
    ]


def test_async_handlers_that_wait_at_the_same_time_are_each_in_their_own_trace(
    inbox: Dsn, spans: Recorded
) -> None:
    for number in range(5):
        put_traced(
            inbox,
            "x",
            key=f"k{number}",
            traceparent=f"00-{number:032x}-{'b' * 16}-01".replace("0" * 32, "f" * 32),
        )
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=5)
    seen: list[tuple[str | None, int, int]] = []

    @worker.handler()
    async def handle(message: saf.Received, _: object) -> None:
        before = trace.get_current_span().get_span_context().trace_id
        await asyncio.sleep(0.01)
        after = trace.get_current_span().get_span_context().trace_id
        seen.append((message.key, before, after))

    worker.drain()
    numbers = [int("f" * 32, 16), 1, 2, 3, 4]
    assert sorted(seen) == [(f"k{place}", one, one) for place, one in enumerate(numbers)]
    assert len(spans.all("process")) == 5


def test_a_batch_that_is_handled_by_one_call_is_linked_to(inbox: Dsn, spans: Recorded) -> None:
    put_traced(inbox, *"abc")
    put_traced(inbox, *map(str, range(2 * MOST_LINKS)), traceparent=OTHER)
    handled(inbox, batch=True)
    span = spans.one("process")
    assert span.parent is None
    assert len(span.links) == MOST_LINKS
    assert said(span)["messaging.batch.message_count"] == 3 + 2 * MOST_LINKS


def test_a_failure_is_in_the_span_by_its_type_and_in_the_log_with_the_trace(
    inbox: Dsn, spans: Recorded
) -> None:
    put_traced(inbox, "x")
    with capture_logs() as logs:
        handled(inbox, fails=True)
    span = spans.one("process")
    assert span.status.status_code is trace.StatusCode.ERROR
    assert said(span)["error.type"] == "ValueError"
    assert "card 4111" not in span.to_json()
    assert [(one["event"], one["trace_id"]) for one in logs] == [("message_failed", SENDER)]


def test_each_attempt_is_a_span(inbox: Dsn, spans: Recorded) -> None:
    from tests.receivers import let_keys_be_due

    put_traced(inbox, "x")
    for _ in range(2):
        handled(inbox, fails=True)
        let_keys_be_due(inbox)
    assert [said(one)["saf.message.attempt"] for one in spans.all("process")] == [1, 2]


def test_processors_work_in_the_traces_of_their_messages(inbox: Dsn, spans: Recorded) -> None:
    put_traced(inbox, "1", key="k")
    saf.Processors(inbox, SUBSCRIPTION, Counter).drain()
    assert trace_id(spans.one("process")) == SENDER


def test_a_delivery_is_a_span_with_links_and_traced_goes_on_with_a_trace(
    inbox: Dsn, spans: Recorded
) -> None:
    put_traced(inbox, "x")
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        for message in delivery:
            with saf.traced(message):
                assert SENDER in json.dumps(encode(Message(service="a", body="")).headers)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        assert not delivery
    receive = spans.one("receive")
    assert (receive.name, receive.kind) == ("receive billing", trace.SpanKind.CLIENT)
    assert [trace.format_trace_id(one.context.trace_id) for one in receive.links] == [SENDER]
    assert trace_id(spans.one("process")) == SENDER


def test_under_asyncio_a_delivery_is_a_span_of_its_task(inbox: Dsn, spans: Recorded) -> None:
    put_traced(inbox, "x")

    async def consume() -> None:
        async with saf.areceive(inbox, SUBSCRIPTION) as delivery:
            receive = trace.get_current_span()
            for message in delivery:
                with saf.traced(message):
                    await asyncio.sleep(0)
            assert trace.get_current_span() is receive
        assert trace.get_current_span() is trace.INVALID_SPAN

    asyncio.run(consume())
    assert len(spans.one("receive").links) == 1
    assert trace_id(spans.one("process")) == SENDER


# Dispatching, routers, dialogs


@pytest.mark.parametrize("mode", ["binary", "structured", "plain"])
def test_a_request_goes_on_with_the_trace_of_its_message(
    inbox: Dsn, spans: Recorded, mode: str
) -> None:
    put_traced(inbox, "x")
    with serving(Partner()) as partner:
        dispatch(inbox, partner, mode=mode)
    span = spans.one("dispatch")
    assert (span.name, trace_id(span)) == ("dispatch partner", SENDER)
    assert said(span)["http.response.status_code"] == 204
    (got,) = partner.accepted
    assert got.headers["traceparent"] == f"00-{SENDER}-{identity(span).span_id:016x}-01"
    if mode == "binary":
        assert got.headers["ce-traceparent"] == PARENT


def test_a_request_with_several_messages_is_linked_to_them(inbox: Dsn, spans: Recorded) -> None:
    put_traced(inbox, "x", "y")
    with serving(Partner()) as partner:
        dispatch(inbox, partner, mode="batch", batch_messages=10)
    span = spans.one("dispatch")
    assert len(span.links) == 2
    assert trace_id(span) in partner.accepted[0].headers["traceparent"]


def test_an_endpoint_that_refuses_is_a_span_that_says_so(inbox: Dsn, spans: Recorded) -> None:
    put_traced(inbox, "x")
    with serving(Partner()) as partner:
        partner.always(400, b"card 4111")
        dispatch(inbox, partner, client_errors="reject")
    span = spans.one("dispatch")
    assert said(span)["http.response.status_code"] == 400
    assert said(span)["error.type"] == "rejected"
    assert "card 4111" not in span.to_json()


def test_the_reply_of_an_endpoint_goes_on_with_the_trace(inbox: Dsn, spans: Recorded) -> None:
    put_traced(inbox, "x", from_service="shop")
    with connect(inbox) as connection:
        create_service(connection, "shop")

    async def answer(_: Got) -> Reply:
        return 200, {"content-type": "text/plain"}, b"done"

    with serving(Partner(answer=answer)) as partner:
        dispatch(inbox, partner, reply=True)
    assert [one["traceparent"] for one in carried(inbox)] == [PARENT]
    assert spans.all("dispatch")


def test_a_routing_service_sends_on_what_a_message_carries(
    new_broker: Any, spans: Recorded
) -> None:
    hub = Hub.at(new_broker)
    with hub.app.connect(role="test") as connection:
        headers = {"traceparent": PARENT}
        saf.Outbox(from_service=SHOP).send(connection, DEPARTURES, "EWR", headers=headers)
    hub.carry()
    (stored,) = carried(hub.ewr, "inbox")
    assert stored["traceparent"] == PARENT
    assert trace_id(spans.one(f"process {DEPARTURES}")) == SENDER


def test_a_dialog_goes_on_with_the_trace_at_both_ends(
    app: Dsn, new_broker: Any, spans: Recorded
) -> None:
    from tests.dialogs import prepare

    there = new_broker("warehouse")
    prepare(app, there)
    with spans.provider.get_tracer("shop").start_as_current_span("request"):
        begin(app, "question")
    forward(app, warehouse=there)

    def answer(connection: Connection, message: saf.Received) -> None:
        assert message.dialog is not None
        with saf.traced(message):
            message.dialog.send(connection, "answer")

    hear(there, "warehouse", answer)
    forward(there, shop=app)
    replies = hear(app, SHOP)
    request = trace_id(spans.one("request"))
    assert [request in one.headers["traceparent"] for one in replies] == [True]


# The log, and the words


def test_a_line_of_the_log_says_its_trace(spans: Recorded) -> None:
    assert trace_ids(None, "", {"event": "x"}) == {"event": "x"}
    with spans.provider.get_tracer("shop").start_as_current_span("request"):
        line = trace_ids(None, "", {"event": "x"})
    now = identity(spans.one("request"))
    assert line["trace_id"] == trace.format_trace_id(now.trace_id)
    assert line["span_id"] == trace.format_span_id(now.span_id)


def test_attributes_are_those_of_the_semantic_conventions(
    app: Dsn, inbox: Dsn, spans: Recorded
) -> None:
    sent(app, headers={"traceparent": PARENT}, expires_at=datetime.now(UTC) + timedelta(days=1))
    forward(app, mom=inbox)
    with serving(Partner()) as partner:
        partner.always(500)
        dispatch(inbox, partner)
    put_traced(inbox, "y")
    handled(inbox, batch=True)
    conventions = (messaging_attributes, error_attributes, http_attributes)
    known = {one for module in conventions for one in vars(module).values() if isinstance(one, str)}
    for span in spans.all():
        for name in said(span):
            assert name in known or name.startswith("saf."), name
