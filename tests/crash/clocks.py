"""A server's clock jumps: an hour ahead, or some seconds back.

An hour ahead, every lease is over at once, and every attempt is due: the stored times move, so that
no later round begins an hour ahead. Back, it is the clock itself (`tests.server_clock`), by less
than a round waits for something that moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from saf.database import Dsn
from tests.crash.plan import Fault

if TYPE_CHECKING:
    from tests.crash.rounds import Round
    from tests.server_clock import ClockedServer

BACK_SECONDS = 10

# All that a running program compares with the clock of the database
JUMPS = (
    "UPDATE saf.member SET lease_until = lease_until - interval '1 hour'",
    # what is after all days waits for a person or a handler
    "UPDATE saf.backoff SET next_attempt_at = next_attempt_at - interval '1 hour' "
    "WHERE next_attempt_at < '9000-01-01'",
)


def jump_clock_source(round_: Round, _: Fault) -> None:
    """The application's."""
    _jump([round_.app])


def jump_clock_mom(round_: Round, _: Fault) -> None:
    """The MOM stores', and with it their hubs'."""
    _jump([*round_.stores.values(), *round_.hubs.values()])


def clock_back_source(round_: Round, _: Fault) -> None:
    """The application's."""
    _go_back(round_.site.source)


def clock_back_mom(round_: Round, _: Fault) -> None:
    """The MOM stores', and with it their hubs'."""
    _go_back(round_.site.mom)


def _go_back(server: ClockedServer) -> None:
    if server.has_clock:
        server.set_clock(server.ahead - BACK_SECONDS)


def _jump(databases: Iterable[Dsn]) -> None:
    for dsn in databases:
        with dsn.connect(role="crash", autocommit=True) as connection, connection.transaction():
            for jump in JUMPS:
                connection.execute(jump)
