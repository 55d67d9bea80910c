"""What a queue gets of messages: topics, headers, bodies; as columns."""

from __future__ import annotations

import json
import sys
from typing import Any
from uuid import UUID

import pytest

from saf.destinations.mapping import Mapped, held_of, mapped, said_of, source_of
from saf.destinations.rabbitmq import Rabbitmq
from saf.destinations.redis import Redis, parse
from saf.errors import Refused, Rejected
from saf.testing.forwarder import HARD, Forwarder, Row

SOURCE = UUID(int=5)
STRUCTURED = "cloudevents-structured"


def given(*rows: Row, topic: str = "{service}", form: str = "saf", **more: Any) -> Mapped:
    settings = Redis.model_validate({"server": "redis://h", "topic": topic, "format": form})
    made = {"prefix": "ce_", "reserved": ["body"]} | more
    return mapped("here", Forwarder().chunk(rows).rows, SOURCE, settings, **made)


def row(**columns: Any) -> Row:
    return Forwarder().message(**columns)


def said(what: Mapped, number: int) -> dict[str, str | None]:
    """All headers of a message."""
    ours = {
        name: values if isinstance(values, str) else values[number].as_py()
        for name, values in what.headers.items()
    }
    return {**what.own[what.which[number]], **ours}


def topics(what: Mapped) -> list[str]:
    return [what.topics[place] for place in what.topic]


@pytest.mark.parametrize(
    ("template", "topic"),
    [
        ("fixed", "fixed"),
        ("orders.{service}", "orders.billing"),
        ("{message_type}", "paid"),
        ("{source}/{shard}", f"{SOURCE}/3"),
        ("{{{service}}}", "{billing}"),
    ],
)
def test_a_template_gives_the_topic(template: str, topic: str) -> None:
    assert topics(given(row(message_type="paid", shard=3), topic=template)) == [topic]


def test_a_message_without_a_type_has_a_word_for_it_in_its_topic() -> None:
    assert topics(given(row(), row(message_type="x"), topic="a.{message_type}")) == [
        "a.untyped",
        "a.x",
    ]


@pytest.mark.parametrize("topic", ["{key}", "{service:3}", "{service!r}", "{", "", "{}"])
def test_a_template_with_anything_else_is_refused_when_settings_are_read(topic: str) -> None:
    with pytest.raises(ValueError, match="topic"):
        Redis(server="redis://h", topic=topic)


def test_what_a_message_lacks_it_has_no_header_for() -> None:
    what = given(row(key=None, headers=None), row(key="k", headers="null", from_service="shop"))
    assert said(what, 0)["saf-key"] is None
    assert (said(what, 1)["saf-key"], said(what, 1)["saf-from"]) == ("k", "shop")
    assert "saf-type" not in what.headers
    assert what.own == [{}, {}]


def test_hard_messages_are_mapped_to_the_last_byte() -> None:
    rows = [row(**columns) for columns in HARD.values()]
    what = given(*rows)
    assert [body.as_py() for body in what.body] == [one["body"] for one in rows]
    assert [said(what, number)["saf-id"] for number in range(len(rows))] == [
        str(one["message_id"]) for one in rows
    ]
    dialog = [*HARD].index("of a dialog")
    assert said(what, dialog)["saf-sequence"] == str(2**62)
    assert said(what, dialog)["saf-conversation"] == str(UUID(int=7))


def test_of_several_messages_some_have_what_these_have() -> None:
    rows = [
        row(to_service=f"s{number % 3}", headers=f'{{"n": "{number % 4}"}}', body=b"%d" % number)
        for number in range(12)
    ]
    what = given(*rows)
    some = what.slice(5, 2)
    assert (some.count, topics(some)) == (2, ["s2", "s0"])
    assert [said(some, number)["n"] for number in range(2)] == ["1", "2"]
    assert [said(some, number)["saf-id"] for number in range(2)] == [
        str(one["message_id"]) for one in rows[5:7]
    ]
    assert [body.as_py() for body in some.body] == [b"5", b"6"]
    assert len(some.own) == 2
    assert what.slice(11, 5).count == 1


def test_a_cloud_event_has_the_attributes_that_are_required() -> None:
    one = row(message_type=None, key="k")
    headers = said(given(one, form="cloudevents"), 0)
    assert {name: headers[f"ce_{name}"] for name in ("id", "source", "specversion", "type")} == {
        "id": str(one["message_id"]),
        "source": f"urn:uuid:{SOURCE}",
        "specversion": "1.0",
        "type": "billing",
    }
    assert headers["ce_partitionkey"] == "k"


@pytest.mark.parametrize(
    ("headers", "form", "said"),
    [
        ('{"saf-id": "x"}', "saf", "a header 'saf-id', which saf gives"),
        ('{"body": "x"}', "saf", "a header 'body', which saf gives"),
        ('{"ce_type": "x"}', "cloudevents", "a header 'ce_type', which saf gives"),
        ('{"ce_type": "x"}', STRUCTURED, "a header 'ce_type', which saf gives"),
        ('{"saf-id": "x"}', STRUCTURED, "a header 'saf-id', which saf gives"),
        ('{"body": "x"}', STRUCTURED, "a header 'body', which saf gives"),
        ("[]", "saf", "the headers are not a JSON object"),
        ('{"n": ' + "9" * 5000 + "}", "saf", "the headers cannot be read"),
        ("[" * 100_000, "saf", "the headers cannot be read"),
    ],
)
def test_headers_that_cannot_be_given_are_rejected(headers: str, form: str, said: str) -> None:
    with pytest.raises(Rejected, match=said):
        given(row(headers=headers), form=form)


def test_a_whole_event_is_the_body_and_the_senders_own_headers_stay_headers() -> None:
    own = '{"content-type": "application/json", "type": "mine", "n": 1}'
    one = row(headers=own, body=b'{"a":  1}', message_type='say "so"\n', key="grüezi")
    what = given(one, row(key=None), form=STRUCTURED)
    assert what.headers == {}
    assert what.own[what.which[0]] == {
        "content-type": "application/cloudevents+json; charset=utf-8",
        "type": "mine",
        "n": "1",
    }
    assert what.own[what.which[1]].keys() == {"content-type"}
    assert what.body[0].as_py().endswith(b',"datacontenttype":"application/json","data":{"a":  1}}')
    event = json.loads(what.body[0].as_py())
    assert (event["type"], event["partitionkey"]) == ('say "so"\n', "grüezi")
    assert "partitionkey" not in json.loads(what.body[1].as_py())


@pytest.mark.parametrize("form", ["saf", "cloudevents", STRUCTURED])
def test_what_is_said_of_a_message_can_be_read_whatever_its_format(form: str) -> None:
    one = row(key="k", shard=3, headers='{"content-type": "application/json", "trace": "x"}')
    what = given(one, form=form)
    headers = {name: value for name, value in said(what, 0).items() if value is not None}
    read = said_of(headers, what.body[0].as_py(), "ce_")
    assert source_of(read, "ce_") == SOURCE
    assert held_of(read, "ce_") == {
        "message_id": one["message_id"].bytes,
        "shard": 3,
        "to_service": "billing",
        "to_broker": None,
        "key": "k",
        "created_at": one["created_at"],
    }


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b"1",
        b'{"source": "/shop", "safshard": 1}',
        b'{"source": "urn:uuid:x"}',
        f'{{"source": "urn:uuid:{SOURCE}"}}'.encode(),
    ],
)
def test_an_event_of_somebody_else_is_not_of_saf(event: bytes) -> None:
    headers = {"content-type": "application/cloudevents+json; charset=utf-8"}
    assert source_of(said_of(headers, event, "ce_"), "ce_") is None
    assert (
        source_of(said_of({"ce_source": "/shop", "ce_safshard": "1"}, event, "ce_"), "ce_") is None
    )


def test_an_event_that_a_sender_has_made_is_a_message_like_any_other() -> None:
    own = '{"content-type": "application/cloudevents+json; charset=utf-8"}'
    event = f'{{"source": "urn:uuid:{UUID(int=6)}", "safshard": "1"}}'.encode()
    what = given(row(headers=own, body=event))
    headers = {name: value for name, value in said(what, 0).items() if value is not None}
    assert source_of(said_of(headers, event, "ce_"), "ce_") == SOURCE


def test_without_its_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("saf.destinations.redis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    there = Redis(server="redis://h")
    for ask in (there.open, there.identity, there.guarantee, there.reading):
        with pytest.raises(Refused, match=r"pip install 'saf-outbox\[redis\]'") as caught:
            ask("events")
        assert "destination 'events' cannot be used" in str(caught.value)


def test_without_pika_a_destination_of_rabbitmq_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("saf.destinations.rabbitmq.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pika", None)
    there = Rabbitmq(server="amqp://h")
    for ask in (there.open, there.guarantee):
        with pytest.raises(Refused, match=r"pip install 'saf-outbox\[rabbitmq\]'"):
            ask("events")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host:6379", "is not an address of a Redis server"),
        ("http://host", "is not an address of a Redis server"),
        ("redis+other://host", "is not an address of a Redis server"),
        ("redis+://host", "is not an address of a Redis server"),
        ("redis://user:hunter2@host", "give a login by username"),
        ("redis://", "lacks a host"),
        ("redis://host:x", "Port could not be cast"),
        ("redis://host/x", "database 'x' is not a number"),
        ("redis://a,b", "names neither sentinel nor cluster"),
        ("redis+sentinel://a", "lacks the name of its master"),
        ("redis+cluster://a/1", "has too much after its host"),
        ("redis://a/1/2", "has too much after its host"),
    ],
)
def test_an_address_that_is_none_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse(text)
    assert "hunter2" not in str(caught.value)
