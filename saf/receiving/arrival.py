"""Arrival: what becomes of a delivery's messages before they are handed out.

By default nothing: all are. What is more than a message on its own, such as one of a dialog, is
taken care of by a `Hook` that is installed once for the process (`install`); the package ``saf``
installs `saf.dialogs`. Receiving itself knows of no dialogs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from saf.received import Received
from saf.setaside.dropped import Reason

if TYPE_CHECKING:
    from saf.receiving.claim import Reader


@dataclass(kw_only=True)
class Arrival:
    """What became of the messages of a delivery."""

    raw: psycopg.Connection[Any]
    messages: list[Received] = field(default_factory=list)
    """To be handed out."""
    ahead: list[Received] = field(default_factory=list)
    """To wait for others."""
    dropped: list[tuple[Received, Reason]] = field(default_factory=list)
    stray: list[tuple[Received, str]] = field(default_factory=list)
    """What answers something that was not begun here, and what is wrong with it."""
    done: list[Received] = field(default_factory=list)
    """saf's own, which has had its effect."""
    refused: list[tuple[Received, str]] = field(default_factory=list)
    """What must not be handed out, and why."""
    fragments: list[tuple[int, Received]] = field(default_factory=list)
    """What is received without being handed out, after how many messages that are."""

    def take_back(self, messages: Sequence[Received]) -> None:
        """Messages that were to be handed out have not been received, in their order."""

    def give_up(self, message: Received) -> None:
        """A message will never be handled."""


class Hook:
    """What is done with messages besides handing them out; as it stands, nothing."""

    def arrive(
        self,
        raw: psycopg.Connection[Any],
        reader: Reader,  # noqa: ARG002 - the hook's signature
        messages: list[Received],
        behind: list[Received],  # noqa: ARG002 - the hook's signature
    ) -> Arrival:
        """Let messages arrive; what is ``behind`` others that wait does so as well."""
        return Arrival(raw=raw, messages=messages)

    def fail_unseen(self, raw: psycopg.Connection[Any], message: Received) -> None:
        """A message cannot be received: it becomes a dead letter without having arrived."""

    def by_itself(self, message: Received) -> Callable[[Any], object] | None:  # noqa: ARG002 - the hook's signature
        """What a message that no handler is for leads to, on a delivery's connection.

        None: nothing, so that it is for a person.
        """
        return None


_installed = Hook()


def install(hook: Hook) -> None:
    """From now on, messages of this process arrive by a hook."""
    global _installed  # noqa: PLW0603 one for the process
    _installed = hook


def hook() -> Hook:
    """The hook that is installed."""
    return _installed
