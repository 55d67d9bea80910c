"""Groups of a delivery's messages that go to handlers together, in the order of each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from saf.received import Received

H = TypeVar("H")


def runs(
    messages: Iterable[Received], handler_of: Callable[[Received], H]
) -> Iterator[tuple[H, list[Received]]]:
    """Group messages by handler, in as few runs as the order of each key allows."""
    runs: dict[H, list[Received]] = {}
    last: dict[str, H] = {}
    for message in messages:
        handler = handler_of(message)
        if message.key is not None:
            before = last.get(message.key, handler)
            if before is not handler and before in runs:
                yield before, runs.pop(before)
            last[message.key] = handler
        runs.setdefault(handler, []).append(message)
    yield from runs.items()


def waves(messages: Iterable[Received], width: int) -> Iterator[list[Received]]:
    """Group messages into waves of up to ``width`` that may run at the same time, in order by key.

    All messages of dialogs count as one key, because dialogs may be related.
    """
    left = list(messages)
    while left:
        wave: list[Received] = []
        rest: list[Received] = []
        keys: set[str | None] = set()
        for message in left:
            key = message.lane if message.conversation_id is None else None
            (wave if len(wave) < width and key not in keys else rest).append(message)
            keys.add(key)
        yield wave
        left = rest
