"""Arrival: what becomes of a delivery's messages before they are handed out.

By default nothing: every message is handed out. A message that is more than a message on its own,
such as one of a dialog, is handled by a `Hook`, which is installed once for the process
(`install`). The package ``saf`` installs `saf.dialogs`; receiving itself knows no dialogs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from saf.received import Received
from saf.setaside.dropped import Reason

if TYPE_CHECKING:
    from saf.receiving.hand import Reader


@dataclass(kw_only=True)
class Arrival:
    """What became of the messages of a delivery: each is in one of these lists."""

    raw: psycopg.Connection[Any]
    messages: list[Received] = field(default_factory=list)
    """Messages to hand out."""
    ahead: list[Received] = field(default_factory=list)
    """Messages that must wait for an earlier one."""
    dropped: list[tuple[Received, Reason]] = field(default_factory=list)
    stray: list[tuple[Received, str]] = field(default_factory=list)
    """Messages that answer a dialog which was not begun here, each with what is wrong with it."""
    done: list[Received] = field(default_factory=list)
    """Messages of saf itself, which have had their effect."""
    refused: list[tuple[Received, str]] = field(default_factory=list)
    """Messages that must not be handed out, each with the reason."""
    fragments: list[tuple[int, Received]] = field(default_factory=list)
    """Messages that are received without being handed out, each with the number of messages in
    ``messages`` that precede it."""

    def take_back(self, messages: Sequence[Received]) -> None:
        """Undo the arrival of some messages, given in order: they have not been received."""

    def give_up(self, message: Received) -> None:
        """Note that a message will never be handled."""


class Hook:
    """What is done with arriving messages besides handing them out; by default, nothing."""

    def arrive(
        self,
        raw: psycopg.Connection[Any],
        reader: Reader,  # noqa: ARG002 - the hook's signature
        messages: list[Received],
        behind: list[Received],  # noqa: ARG002 - the hook's signature
    ) -> Arrival:
        """Let messages arrive. One that is ``behind`` others of its key that wait, waits too."""
        return Arrival(raw=raw, messages=messages)

    def fail_unseen(self, raw: psycopg.Connection[Any], message: Received) -> None:
        """Deal with a message that cannot be received: a dead letter that has not arrived."""

    def body_hashes(
        self,
        raw: psycopg.Connection[Any],  # noqa: ARG002 - the hook's signature
        reader: Reader,  # noqa: ARG002 - the hook's signature
        messages: Sequence[Received],  # noqa: ARG002 - the hook's signature
    ) -> dict[Received, str]:
        """Return the SHA-256 of the bodies that were not read, of some messages."""
        return {}

    def is_of_saf(self, message: Received) -> bool:  # noqa: ARG002 - the hook's signature
        """Whether a message is one that saf says without a key, and that is safe to believe."""
        return False

    def by_itself(self, message: Received) -> Callable[[Any], object] | None:  # noqa: ARG002 - the hook's signature
        """Return what to do, with a delivery's connection, about a message that has no handler.

        None means nothing: the message is set aside as any other that has no handler.
        """
        return None


_installed = Hook()


def install(hook: Hook) -> None:
    """Let all messages that this process receives arrive by this hook."""
    global _installed  # noqa: PLW0603 one for the process
    _installed = hook


def hook() -> Hook:
    """Return the hook that is installed."""
    return _installed
