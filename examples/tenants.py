"""Many tenants: a database for each, and one forwarder and one service for all.

    export SERVER_DSN=postgresql://localhost/postgres MOM_DSN=postgresql://localhost/mom
    saf migrate --dsn "$MOM_DSN"
    saf service create billing --config tenants.toml
    python tenants.py add acme                           # a database tenant_acme, migrated
    python tenants.py place acme A-1 90                  # an order of this tenant
    saf forward --config tenants.toml                    # all tenants, including future ones
    saf worker tenants:billing

Each tenant is a broker of the fleet in tenants.toml: `saf status --config tenants.toml` lists it as
tenants/tenant_acme. A database that is down, or has a deep backlog, does not block other tenants.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

import saf
from saf.broker.migrate import migrate
from saf.database import Dsn

billing = saf.Worker(os.environ["MOM_DSN"], "billing")

ORDERS = "CREATE TABLE IF NOT EXISTS orders (number text PRIMARY KEY, total int NOT NULL)"
ORDER = "INSERT INTO orders (number, total) VALUES (%s, %s)"
INVOICES = "CREATE TABLE IF NOT EXISTS invoice (tenant text, number text, total int)"
INVOICE = "INSERT INTO invoice (tenant, number, total) VALUES (%s, %s, %s)"


def dsn_of(tenant: str) -> str:
    """Return the connection string of a tenant's database, on the same server."""
    return make_conninfo(os.environ["SERVER_DSN"], dbname=f"tenant_{tenant}")


def add(tenant: str) -> None:
    """Create a tenant. The forwarder finds it by its name."""
    with psycopg.connect(os.environ["SERVER_DSN"], autocommit=True) as server:
        name = sql.Identifier(f"tenant_{tenant}")
        server.execute(sql.SQL("CREATE DATABASE {}").format(name))
    migrate(Dsn(dsn_of(tenant)))


def place(tenant: str, number: str, total: str) -> None:
    """Place a tenant's order; equal numbers of two tenants mean two different orders."""
    with psycopg.connect(dsn_of(tenant)) as connection:
        connection.execute(ORDERS)
        connection.execute(ORDER, [number, total])
        saf.Outbox().send(
            connection,
            "billing",
            {"order": number, "total": int(total)},
            key=f"{tenant}/{number}",
            headers={"tenant": tenant},
            message_type="OrderPlaced",
        )


@billing.handler("OrderPlaced")
def placed(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
    """Write the invoice of an order, for any tenant."""
    order = message.json()
    connection.execute(INVOICES)
    connection.execute(INVOICE, [message.headers["tenant"], order["order"], order["total"]])


if __name__ == "__main__":
    what, *about = sys.argv[1:]
    if what == "add":
        add(*about)
    else:
        place(*about)
