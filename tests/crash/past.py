"""What is true of a round in which something was set back.

It is read, by plain SQL, in the data as it was: what the set-back has taken away, and what the copy
had. A *life* of the application ends when its database is set back; the next one goes on from the
copy. What each life has committed is in that life's table ``sent``.

- What only earlier lives have committed is forgotten: nobody has to deliver it any more, and where
  it has arrived, it stays.
- What the copy had, and what was not known there to have arrived, may come once more.
- What a MOM store has lost comes again, once, and perhaps after later messages of its key.
- A talk may fail, if it does so at both of its ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import psycopg

SENT = "SELECT account, n, token, service, poison, mortal FROM sent"
TALKS = "SELECT conversation::text FROM talk"
STORED = "SELECT convert_from(body, 'UTF8') FROM saf.inbox WHERE conversation_id IS NULL"
# What the source may take for not delivered yet. What is parked is purged from the outbox
UNSETTLED = """
SELECT convert_from(o.body, 'UTF8') FROM saf.outbox o JOIN saf.outbox_status s USING (shard, id)
WHERE s.status <> 'forwarded' AND o.conversation_id IS NULL
UNION ALL
SELECT convert_from(body, 'UTF8') FROM saf.parked JOIN saf.subscription s USING (subscription_id)
WHERE s.log = 'outbox' AND conversation_id IS NULL
"""

Message = tuple[str, int, str]
"""Account, count and token."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the application says of a message."""

    service: str
    poison: bool
    mortal: bool


Life = dict[Message, Known]
"""All that a life of the application has committed."""


@dataclass(kw_only=True)
class Past:
    """Empty where nothing was set back."""

    lives: list[Life] = field(default_factory=list)
    """Those of the application that are over."""
    again: Counter[Message] = field(default_factory=Counter)
    """How often messages may have been delivered once more."""
    out_of_turn: set[Message] = field(default_factory=set)
    taken_away: int | None = None
    """How many messages set-backs have made a source or a destination forget; None without any."""
    talks: set[str] = field(default_factory=set)
    """Those of earlier lives."""

    @property
    def went_back(self) -> bool:
        """Whether anything did."""
        return self.taken_away is not None

    @property
    def forgotten(self) -> Life:
        """What earlier lives have committed; the newest one may have, too."""
        return {message: known for life in self.lives for message, known in life.items()}

    def source_goes_back(self, was: str, copy: str) -> None:
        """The application's database is what the copy is, and not any more what it was."""
        known = life(copy).keys()
        settled = known - unsettled(copy)
        self.lives.append(life(was))
        # what was prepared when the copy was taken is committed later, and was perhaps already
        self.again.update(self.lives[-1].keys() - settled)
        with psycopg.connect(was) as connection:
            if connection.execute("SELECT to_regclass('talk')").fetchone() != (None,):
                self.talks.update(talk for (talk,) in connection.execute(TALKS).fetchall())
        self._take_away(len(self.lives[-1].keys() - known))

    def store_goes_back(self, was: str, copy: str) -> int:
        """A MOM store is what the copy is; return how many messages it has lost."""
        lost = stored(was) - stored(copy)
        self.destination_goes_back(lost)
        return len(lost)

    def destination_goes_back(self, lost: set[Message]) -> None:
        """A destination, of any kind, has forgotten these."""
        self.out_of_turn |= lost
        self._take_away(len(lost))

    def _take_away(self, count: int) -> None:
        self.taken_away = (self.taken_away or 0) + count


def life(source: str) -> Life:
    """All that the application has committed, as far as its database knows."""
    with psycopg.connect(source) as connection:
        rows = connection.execute(SENT).fetchall()
    return {
        (account, n, token): Known(service=service, poison=poison, mortal=mortal)
        for account, n, token, service, poison, mortal in rows
    }


def unsettled(source: str) -> set[Message]:
    """What a source may take for not delivered yet."""
    with psycopg.connect(source) as connection:
        return {message(body) for (body,) in connection.execute(UNSETTLED).fetchall()}


def stored(store: str) -> set[Message]:
    """What is in an inbox."""
    with psycopg.connect(store) as connection:
        return {message(body) for (body,) in connection.execute(STORED).fetchall()}


def message(body: str) -> Message:
    """Which one it is."""
    account, n, token, *_ = body.split()
    return account, int(n), token
