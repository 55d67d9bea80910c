"""Classifiers, as an application would have them in a module of its own."""

from __future__ import annotations

from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

import saf

asked: list[str | None] = []
"""The keys of the messages that `by_origin` was asked for in this process, or ids."""


def by_origin(message: saf.Received) -> str | None:
    """The service that the body names."""
    asked.append(message.key)
    origin = message.json()["origin"]
    return None if origin is None else str(origin)


def by_body(messages: pa.RecordBatch) -> pa.Array:
    """The service whose name is the body's text; fails for a batch in which one says so."""
    asked.extend(messages["key"].to_pylist())
    texts = messages["body"].cast(pa.string())
    if pc.any(pc.equal(texts, "fail")).as_py():
        raise ValueError("told to fail")
    return pc.if_else(pc.equal(texts, "nobody"), None, texts)


def with_all(messages: pa.RecordBatch) -> pa.RecordBatch:
    """A service, a broker and a key of its own for each."""
    count = messages.num_rows
    broker = str(UUID(int=7))
    keys = messages["body"].cast(pa.string())
    answers = {"key": keys, "service": ["s"] * count, "broker": [broker] * count}
    return pa.RecordBatch.from_pydict(answers)


def one_by_one(message: saf.Received) -> saf.Resolved:
    """The same."""
    return saf.Resolved(service="s", broker=UUID(int=7), key=message.text())


def to_ewr_by_body(message: saf.Received) -> saf.Resolved:
    """EWR, with a key of its own."""
    return saf.Resolved(service="EWR", key=message.text())


def too_few(messages: pa.RecordBatch) -> pa.Array:
    return pa.array(["s"] * (messages.num_rows + 1))


def of_the_wrong_type(message: saf.Received) -> object:
    return message.id


def to_first(message: saf.Received) -> str:
    """Of routers named r0, r1, …, the next."""
    return f"r{int(message.service.removeprefix('r')) + 1}"


def back(message: saf.Received) -> str:
    """Of the routers a and b, the other."""
    return {"a": "b", "b": "a"}[message.service]


no_function = 7


def by_text(message: saf.Received) -> str | None:
    """As `by_body`."""
    if message.text() == "fail":
        raise ValueError("told to fail")
    return None if message.text() == "nobody" else message.text()


def to_ewr(message: saf.Received) -> str:  # noqa: ARG001 - whatever it says
    """The service EWR."""
    return "EWR"


def by_body_once(message: saf.Received) -> str | None:
    """As `by_text`, and notes the conversation, or else the key, of what it was asked for."""
    asked.append(str(message.conversation_id or message.key))
    return by_text(message)


def by_beginning_once(message: saf.Received) -> str:
    """The service that a body begins with; notes the same."""
    asked.append(str(message.conversation_id))
    return message.text()[:3]


def to_second(message: saf.Received) -> saf.Resolved:  # noqa: ARG001 - whatever it says
    """The router second, at a broker."""
    return saf.Resolved(service="second", broker=UUID(int=7))


def to_the_second(message: saf.Received) -> str:  # noqa: ARG001 - whatever it says
    """The router second, at whichever broker."""
    return "second"


def to_billing(message: saf.Received) -> str:  # noqa: ARG001 - whatever it says
    """The service billing."""
    return "billing"
