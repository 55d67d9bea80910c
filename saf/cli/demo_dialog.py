"""``saf demo --dialog``: a shop and a warehouse talk, by way of a forwarder and a MOM store."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql
from rich.text import Text

from saf.cli.console import Listing, plain_console
from saf.config import Broker, Route, Settings
from saf.destinations.postgresql import Postgresql
from saf.operating.wording import shown

if TYPE_CHECKING:
    from uuid import UUID

    from saf.broker.embedded import EmbeddedServer
    from saf.database import Dsn
    from saf.demo.trade import Trade

DEADLINE_SECONDS, PAUSE_SECONDS = 90.0, 0.2
STYLES = {"shop": "cyan", "warehouse": "magenta"}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The outcome of a talk, at both ends."""

    name: str
    shop: str | None
    """The state of the shop's end; None if it does not exist."""
    warehouse: str | None
    error: int | None
    right: bool


def converse(server: EmbeddedServer, *, reset: bool) -> dict[str, Any]:
    """Run the talks between shop and warehouse; return whether each talk ended as it should."""
    from saf.demo.trade import SHOP, TRADE, WAREHOUSE, Trade
    from saf.forwarding.forwarder import Forwarder
    from saf.forwarding.runner import InProcess
    from saf.routing_service import RoutingService

    started = time.monotonic()
    console = plain_console(stderr=True)

    def say(speaker: str, talk: str, what: str) -> None:
        at = f"{time.monotonic() - started:5.1f} s"
        line = Text.assemble(at, f"  {talk:10}", (f"{speaker:11}", STYLES[speaker]), shown(what))
        console.print(line, soft_wrap=True)

    dsns = {name: server.dsn(name) for name in (SHOP, TRADE, WAREHOUSE)}
    settings = _settings(dsns)
    _prepare(server, reset=reset)
    trade, messages = Trade(say=say), 0
    with dsns[SHOP].connect(role="demo") as connection:
        trade.begin(connection)
    shop, warehouse = trade.shop(dsns[SHOP]), trade.warehouse(dsns[WAREHOUSE])
    between = RoutingService(dsns[TRADE], TRADE, declared=settings.declared)
    ends = _ends(dsns, trade)
    until = time.monotonic() + DEADLINE_SECONDS
    while not all(end.right for end in ends) and time.monotonic() < until:
        messages += Forwarder(settings, InProcess()).drain().forwarded
        for end in (between, warehouse, shop):
            end.drain()
        ends = _ends(dsns, trade)
        time.sleep(PAUSE_SECONDS)
    return {
        "right": all(end.right for end in ends),
        "talks": [asdict(end) for end in ends],
        "forwarded": messages,
        "seconds": round(time.monotonic() - started, 1),
    }


def listing(result: dict[str, Any]) -> Listing:
    """Return a row for each talk: its state at both ends, and whether that is right."""
    rows = Listing("talk", "shop's end", "warehouse's end", "error", "this is")
    for talk in result["talks"]:
        rows.add(
            talk["name"],
            talk["shop"] or "",
            talk["warehouse"] or "",
            "" if talk["error"] is None else str(talk["error"]),
            "right" if talk["right"] else "wrong",
        )
    return rows


def _prepare(server: EmbeddedServer, *, reset: bool) -> None:
    from saf.broker.migrate import migrate
    from saf.demo.trade import SHOP, TRADE, WAREHOUSE, prepare

    for name in (SHOP, TRADE, WAREHOUSE):
        if reset:
            with server.dsn("postgres").connect(role="demo", autocommit=True) as connection:
                drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
                connection.execute(drop.format(sql.Identifier(name)))
        dsn = server.create_database(name)
        migrate(dsn)
        prepare(dsn, name)


def _settings(dsns: dict[str, Dsn]) -> Settings:
    """Return the settings of a saf.toml in which each service lives in the database of its name."""
    return Settings.model_construct(
        brokers={name: Broker(dsn=dsn) for name, dsn in dsns.items()},
        destinations={name: Postgresql(dsn=dsn) for name, dsn in dsns.items()},
        routes=tuple(Route(service=name, destination=name) for name in dsns),
    )


def _ends(dsns: dict[str, Dsn], trade: Trade) -> list[Ended]:
    """Return the state of the talks, from the databases."""
    from saf.demo.trade import SHOP, WAREHOUSE
    from saf.dialogs.conversations import Conversation, conversations
    from saf.dialogs.statements import Code

    known: dict[UUID, Conversation] = {}
    for name in (SHOP, WAREHOUSE):
        with dsns[name].connect(role="demo", autocommit=True) as connection:
            known |= {item.conversation_id: item for item in conversations(connection)}
    ends = []
    for talk in trade.talks.values():
        ids = (talk.conversations.get(name) for name in (SHOP, WAREHOUSE))
        pair = [known.get(item) if item else None for item in ids]
        shop, warehouse = (str(item.state) if item else None for item in pair)
        codes = {item.error_code for item in pair if item}
        # a message that comes too late may never arrive
        closed = ("closed", None) if talk.code == Code.EXPIRED else ("closed",)
        ends.append(
            Ended(
                name=talk.name,
                shop=shop,
                warehouse=warehouse,
                error=next(filter(None, codes), None),
                right=warehouse in closed
                and (shop, codes, talk.told) == ("closed", {talk.code}, talk.expected),
            )
        )
    return ends
