"""What people and checkpoints give: saf.toml, plans, connection strings, offsets, snapshots."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from saf import config
from saf.database import Dsn
from saf.errors import ConfigurationError
from saf.log.offset import Offset
from saf.operating.plans import file as plans
from tests.fuzz.target import Target, documents, encoded, nearly

SECRET = "s3kr1t"
SETTINGS = f"""
[brokers.shop]
dsn = "postgresql://app:{SECRET}@localhost/shop"
[fleets.tenants]
dsn = "host=localhost dbname=postgres"
databases = "tenant_*"
[destinations.mom]
dsn = "postgresql://localhost/mom"
quality = "at_least_once"
[destinations.events]
kind = "redis"
server = "redis://localhost:6379"
topic = "orders.{{service}}"
[forwarder]
default_destination = "mom"
interval_seconds = 0.5
[[routes]]
service = "billing"
destination = "mom"
[[topics]]
name = "orders"
services = ["billing"]
[routers.departures]
kind = "sql"
expression = "key"
[bounds]
connect_seconds = 5
[ui]
redact_paths = ["$..password"]
""".encode()
PLAN = b"""
[[brokers.shop.services]]
name = "billing"
[[brokers.shop.message_types]]
name = "Paid"
validation = "json_schema"
schema = '{"type": "object"}'
[[brokers.shop.routes]]
service = "billing"
destination = "mom"
"""
URL = f"postgresql://app:{SECRET}@db.example.com:5432,other:5433/shop?sslmode=require&options=-c".encode()
PAIRS = f"host=/run/postgresql port=5432 dbname=shop user=app password='{SECRET}'".encode()
OFFSET = {
    "broker": "b",
    "incarnation": 0,
    "subscription": 1,
    "batch": 2,
    "done": "10:20:10,15",
}


def read(how: Callable[[Path], object]) -> Callable[[bytes], None]:
    """Reading a file with such a content."""

    def check(content: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".toml") as file:
            Path(file.name).write_bytes(content)
            try:
                how(Path(file.name))
            except ConfigurationError as error:
                assert file.name in str(error)  # noqa: PT017 - of those that are refused

    return check


def connect(raw: bytes) -> None:
    """What libpq takes for the password is shown nowhere."""
    text = raw.decode(errors="replace")
    try:
        parts = conninfo_to_dict(text)
    except (psycopg.Error, ValueError):
        parts = {}
    public = any(SECRET in str(value) for name, value in parts.items() if name != "password")
    try:
        shown = f"{(dsn := Dsn(text))} {dsn!r} {dsn.database} {dsn.redact(text)}"
    except ConfigurationError as error:
        shown = str(error)
    assert public or SECRET not in shown


def go_on(given: Any) -> None:
    with suppress(ValueError):
        offset = Offset.from_dict(given)
        assert Offset.from_dict(json.loads(json.dumps(offset.as_dict()))) == offset


members = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats())

TARGETS = (
    Target(name="saf.toml", given=nearly(SETTINGS) | encoded(documents()), check=read(config.load)),
    Target(name="plan", given=nearly(PLAN) | encoded(documents()), check=read(plans.read)),
    Target(
        name="dsn",
        given=nearly(URL) | nearly(PAIRS) | st.binary(),
        check=connect,
        found=(
            f"dbname=shop user=app\0 password='{SECRET}'".encode(),
            f"host=db dbname=shop password=x\\{SECRET}".encode(),
        ),
    ),
    Target(
        name="offset",
        given=st.dictionaries(st.sampled_from([*OFFSET, "open", "position"]), members).map(
            lambda other: OFFSET | other
        ),
        check=go_on,
    ),
)
