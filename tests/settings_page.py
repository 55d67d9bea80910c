"""docs/reference/settings.md: every table and key of saf.toml, from the models that read it.

python -m tests.settings_page     # writes the page
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import annotated_types
import pydantic
from pydantic import AfterValidator, BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from saf.config import Settings, Waits
from saf.database import Dsn
from saf.database.bounds import Bounds
from saf.destinations.kinds import DEFAULT, OURS, settings_of
from saf.sources.kinds import OURS as SOURCES
from saf.sources.kinds import settings_of as source_of
from tests.docstrings import attribute_docstrings, markdown, one_line

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"

HEAD = """# saf.toml

This page is for operators who write a saf.toml. It lists every table and key. `python -m
tests.settings_page` writes it from the models that read the file.

- Unknown tables and keys are refused; the error names the nearest known one.
- `${NAME}` is replaced by the environment variable `NAME`, so that secrets stay out of the file.
  In the middle of a dsn, it is the value of one parameter and is taken as it is.
- An environment variable overrides a single setting: `SAF_FORWARDER__CHUNK_ROWS=10000` is
  `chunk_rows` of `[forwarder]`.
- A `dsn` is `postgresql://user@host:5432/database` or `host=… dbname=…`, with libpq's parameters.
"""

EXAMPLE = """\
[bounds]
network_seconds = 30.0
lock_seconds = 10.0
statement_seconds = 60.0
chunk_seconds = 300.0
long_seconds = 3600.0

[brokers.shop]
dsn = "postgresql://saf_forwarder:${SHOP_PASSWORD}@db1.example.com/shop?sslmode=verify-full"
max_connections = 10

[fleets.tenants]
dsn = "postgresql://saf_forwarder:${TENANTS_PASSWORD}@db2.example.com/postgres"
databases = "tenant_*"
refresh_seconds = 60.0
max_connections = 4

[fleets.regions]
dsn = "${REGIONS_DSN}"
query = "SELECT name, dsn FROM region"

[destinations.mom]
kind = "postgresql"
rate = "1000/s"
concurrency = 4
dsn = "${MOM_DSN}"
quality = "exactly_once"
max_connections = 50

[destinations.lake]
kind = "jsonl"
rate = "1000/s"
concurrency = 4
folder = "/srv/lake"
quality = "at_least_once"
max_connections = 4
max_line_bytes = 1048576
lock_seconds = 30.0

[destinations.orders]
kind = "nats"
rate = "1000/s"
concurrency = 4
server = "tls://nats-1.example.com:4222,nats-2.example.com:4222"
stream = "ORDERS"
topic = "orders.{service}"
format = "saf"
replicas = 3
step_rows = 1000
username = "saf"
password = "${NATS_PASSWORD}"
# token = "${NATS_TOKEN}"                            # instead of username
# nkey_file = "/run/secrets/saf.nk"                  # instead of username
# creds_file = "/run/secrets/saf.creds"              # instead of username
ca_file = "/etc/ssl/nats-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
quality = "exactly_once"
max_connections = 4

[destinations.work]
kind = "rabbitmq"
rate = "1000/s"
concurrency = 4
server = "amqps://rabbit-1.example.com:5671,rabbit-2.example.com:5671/shop"
username = "saf"
password = "${RABBITMQ_PASSWORD}"
ca_file = "/etc/ssl/rabbitmq-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
exchange = "orders"
topic = "orders.{service}"
format = "saf"
step_rows = 5000
quality = "at_least_once"
max_connections = 4

[destinations.flights]
kind = "kafka"
rate = "1000/s"
concurrency = 4
brokers = "kafka-1.example.com:9093,kafka-2.example.com:9093"
security_protocol = "SASL_SSL"
sasl_mechanism = "SCRAM-SHA-512"
username = "saf"
password = "${KAFKA_PASSWORD}"
ca_file = "/etc/ssl/kafka-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
key_password = "${KAFKA_KEY_PASSWORD}"
topic = "flights.{service}"
format = "cloudevents"
marks_topic = "saf.marks"
partitions = 12
replicas = 3
step_rows = 50000
compression = "lz4"
quality = "exactly_once"
max_connections = 4

[destinations.bookings]
kind = "kafka"
brokers = "kafka.example.com:9093"
security_protocol = "SASL_SSL"
sasl_mechanism = "OAUTHBEARER"
sasl_oauthbearer_token_endpoint_url = "https://login.example.com/oauth2/token"
sasl_oauthbearer_client_id = "saf"
sasl_oauthbearer_client_secret = "${KAFKA_CLIENT_PASSWORD}"
sasl_oauthbearer_scope = "kafka"
sasl_oauthbearer_extensions = "logicalCluster=lkc-1"
https_ca_file = "/etc/ssl/login-ca.pem"
topic = "bookings.{service}"
format = "avro"
schema_registry = "https://registry.example.com:8081"
schema_registry_username = "saf"
schema_registry_password = "${KAFKA_PASSWORD}"
schema_registry_ca_file = "/etc/ssl/registry-ca.pem"
subject = "{topic}-{message_type}"

[destinations.shipments]
kind = "rabbitmq_stream"
rate = "1000/s"
concurrency = 4
server = "rabbitmq-stream+tls://rabbit-1.example.com:5551,rabbit-2.example.com:5551/shop"
username = "saf"
password = "${RABBITMQ_PASSWORD}"
ca_file = "/etc/ssl/rabbitmq-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
marks = "saf-marks"
topic = "orders.{service}"
format = "saf"
replicas = 3
step_rows = 5000
quality = "exactly_once"
max_connections = 4

[destinations.partner]
kind = "https"
rate = "1000/s"
concurrency = 4
server = "https://partner.example.com/saf"
secret = "${PARTNER_SECRET}"
ca_file = "/etc/ssl/partner-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
quality = "exactly_once"
max_connections = 4

[destinations.events]
kind = "redis"
rate = "1000/s"
concurrency = 4
server = "rediss://redis.example.com:6379/0"
username = "saf"
password = "${REDIS_PASSWORD}"
ca_file = "/etc/ssl/redis-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
hash_tag = "saf"
topic = "orders.{service}"
format = "saf"
replicas = 1
step_rows = 2000
quality = "exactly_once"
max_connections = 4

[destinations.table]
kind = "delta"
rate = "1000/s"
concurrency = 4
table = "s3://lake/messages"
partition_by = "day"
promote = {amount = "double", paid_at = "timestamp"}
storage_options = {AWS_SECRET_ACCESS_KEY = "${LAKE_PASSWORD}"}
quality = "exactly_once"
max_connections = 4

[destinations.catalogued]
kind = "iceberg"
rate = "1000/s"
concurrency = 4
catalog = "postgresql://db.example.com/lake?sslmode=require"
table = "shop.messages"
warehouse = "s3://lake/warehouse"
catalog_name = "saf"
username = "saf"
password = "${LAKE_PASSWORD}"
partition_by = "day"
promote = {amount = "double", paid_at = "timestamp"}
properties = {"s3.secret-access-key" = "${LAKE_PASSWORD}"}
quality = "exactly_once"
max_connections = 4

[[routes]]
service = "billing"
broker = "6f1e7f3c-3a58-4a7e-9a52-3f1f0a4a9a11"
destination = "mom"
quality = "at_least_once"
expires_at = 2031-01-01T00:00:00Z
comment = "until the move"

[topics.prices]
comment = "prices of all shops"

[routers.departures]
kind = "sql"
expression = "json:origin"
once_per = "message"
mode = "redirect"
comment = "to its airport"

[[transforms]]
service = "billing"
function = "customers:enriched"
deterministic = true
comment = "the names of customers"

[forwarder]
default_destination = "mom"
chunk_rows = 50000
chunk_bytes = 33554432
max_bytes = 67108864
lease_seconds = 30.0
interval_seconds = 1.0
turn_seconds = 2.0
max_connections = 10
max_sessions = 200
attempts = 3
max_rejected = 10
use_spark = "auto"
master = "local[*]"
tasks = 8
spark = {"spark.driver.memory" = "2g"}

[purge]
retention_seconds = 604800.0
rotate_after_seconds = 86400.0
archive = "/srv/saf-archive"

[endpoints.billing]
url = "https://billing.example.com/hooks"
broker = "mom"
subscription = "billing"
mode = "structured"
source = "/shop"
secrets = ["${BILLING_SECRET}"]
bearer = "${BILLING_TOKEN}"
reply = true
reply_type = "OrderBilled"
one_reply = ["asking"]
ca_file = "/etc/ssl/saf/ca.pem"
client_certificate = "/etc/ssl/saf/us.pem"
client_key = "/etc/ssl/saf/us.key"
public_only = true
http2 = true
networks = ["10.1.0.0/16"]
max_in_flight = 50
rate = "100/s"
timeout_seconds = 15.0
connect_seconds = 5.0
attempts = 10
schedule = "webhook"
follow_redirects = false
client_errors = "wait"
breaker_failures = 5
disable_after_seconds = 432000.0

[dispatch]
networks = ["10.1.0.0/16"]

[sources.payments]
kind = "redis"
server = "rediss://redis.example.com:6379/0"
topic = "payments"
service = "billing"
into = "mom"
named_services = false
key_header = "order"
start = "earliest"
chunk_rows = 10000
username = "saf"
password = "${REDIS_PASSWORD}"
ca_file = "/etc/ssl/redis-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
body_field = "body"

[sources.orders]
kind = "kafka"
brokers = "kafka-1.example.com:9093,kafka-2.example.com:9093"
topic = "orders"
service = "shipping"
into = "mom"
named_services = true
key_header = "order"
start = "latest"
chunk_rows = 20000
security_protocol = "SASL_SSL"
sasl_mechanism = "SCRAM-SHA-512"
username = "saf"
password = "${KAFKA_PASSWORD}"
ca_file = "/etc/ssl/kafka-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"
key_password = "${KAFKA_KEY_PASSWORD}"
schema_registry = "https://registry.example.com:8081"
schema_registry_username = "saf"
schema_registry_password = "${KAFKA_PASSWORD}"
schema_registry_ca_file = "/etc/ssl/registry-ca.pem"

[sources.refunds]
kind = "kafka"
brokers = "kafka-1.example.com:9093"
topic = "refunds"
service = "billing"
into = "mom"
security_protocol = "SASL_SSL"
sasl_mechanism = "OAUTHBEARER"
sasl_oauthbearer_token_endpoint_url = "https://login.example.com/token"
sasl_oauthbearer_client_id = "saf"
sasl_oauthbearer_client_secret = "${KAFKA_CLIENT_PASSWORD}"
sasl_oauthbearer_scope = "kafka"
sasl_oauthbearer_extensions = "logicalCluster=lkc-1"
https_ca_file = "/etc/ssl/login-ca.pem"

[sources.shipments]
kind = "nats"
server = "tls://nats-1.example.com:4222,nats-2.example.com:4222"
stream = "SHIPMENTS"
topic = "shipments.*"
service = "shipping"
into = "mom"
named_services = false
key_header = "order"
start = "latest"
chunk_rows = 10000
username = "saf"
password = "${NATS_PASSWORD}"
# token = "${NATS_TOKEN}"                            # instead of username
# nkey_file = "/run/secrets/saf.nk"                  # instead of username
# creds_file = "/run/secrets/saf.creds"              # instead of username
ca_file = "/etc/ssl/nats-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"

[sources.returns]
kind = "rabbitmq_stream"
server = "rabbitmq-stream+tls://rabbit-1.example.com,rabbit-2.example.com/shop"
topic = "returns"
service = "shipping"
into = "mom"
named_services = false
key_header = "order"
start = "latest"
chunk_rows = 10000
username = "saf"
password = "${RABBITMQ_PASSWORD}"
ca_file = "/etc/ssl/rabbit-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"

[sources.claims]
kind = "rabbitmq"
server = "amqps://rabbit-1.example.com,rabbit-2.example.com/shop"
topic = "claims"
service = "billing"
into = "mom"
named_services = false
key_header = "order"
start = "earliest"
chunk_rows = 5000
window_messages = 200000
window_seconds = 1209600.0
username = "saf"
password = "${RABBITMQ_PASSWORD}"
ca_file = "/etc/ssl/rabbit-ca.pem"
certificate_file = "/etc/ssl/saf.pem"
key_file = "/etc/ssl/saf.key"

[endpoints.orders]
url = "https://orders.example.com/hooks"
token_url = "https://login.example.com/oauth/token"
client_id = "shop"
client_secret = "${ORDERS_SECRET}"
scope = "hooks"
proxy = "http://proxy.example.com:3128"
proxy_user = "saf"
proxy_password = "${PROXY_PASSWORD}"
rate_per_key = "1/s"

[endpoints.warehouse]
url = "https://warehouse.example.com/soap"
mode = "soap"
wsdl = "/etc/saf/warehouse.wsdl"
operation = "BookOrder"

[endpoints.lake]
url = "https://lake.example.com/events"
mode = "batch"
batch_messages = 100
batch_of = "keys"

[endpoints.chat]
url = "https://chat.example.com/hooks"
mode = "plain"
template = '{"order": {{key}}}'
template_type = "application/json"

[endpoints.ledger]
url = "https://ledger.example.com/RPC2"
mode = "xmlrpc"
method = "order.paid"
user = "saf"
password = "${LEDGER_PASSWORD}"

[ui]
token = "${UI_VIEW_TOKEN}"
operate_token = "${UI_OPERATE_TOKEN}"
user_header = "X-Forwarded-User"
proxies = ["10.1.0.0/16"]
hosts = ["saf.example.com"]
operators = ["ann", "bob"]
session_seconds = 28800
bodies = true
redact_headers = ["authorization", "cookie", "x-customer-*"]
redact_paths = ["$.card.number", "$..password"]
trace_url = "https://tempo.example.com/trace/{trace_id}"

[signing]
key_id = "billing-2026"
algorithm = "hmac-sha256"
secret_file = "/run/secrets/billing-2026"
# secret = "${BILLING_SIGNING_KEY}"                 # instead of secret_file
redirected_from = ["departures"]

[signing.keys.shop-2026]
algorithm = "ed25519"
public_key_file = "/etc/saf/shop-2026.pub"
from_services = ["shop"]

[signing.keys.shop-2027]
algorithm = "ed25519"
public_key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
from_services = ["shop"]

[signing.keys.bank-2026]
algorithm = "hmac-sha256"
secret = "${BANK_SIGNING_KEY}"

[signing.keys.news-2026]
algorithm = "hmac-sha256"
secret_file = "/run/secrets/news-2026"
"""
"""A file with every key; a test loads it, and looks that none is missing."""

NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    SecretStr: "text, a secret",
    UUID: "UUID",
    Dsn: "dsn",
    datetime.datetime: "time",
    pydantic.AwareDatetime: "time with its zone",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of saf.toml, and the model that reads it."""

    name: str
    """Of the field of `Settings`."""
    header: str
    """As the file has it."""
    model: type[BaseModel]
    title: str


def tables() -> Iterator[Table]:
    """All of them, in the order of their models."""
    for name, field in Settings.model_fields.items():
        origin, arguments = get_origin(field.annotation), get_args(field.annotation)
        if name == "destinations":
            for kind in OURS:
                model = settings_of(kind)
                title = f"[destinations.NAME], kind {kind!r}"
                title += ", the default" if kind == DEFAULT else ""
                yield Table(name=name, header="[destinations.NAME]", model=model, title=title)
        elif name == "sources":
            for kind in SOURCES:
                title = f"[sources.NAME], kind {kind!r}"
                yield Table(name=name, header="[sources.NAME]", model=source_of(kind), title=title)
        elif origin is dict:
            header = f"[{name}.NAME]"
            yield Table(name=name, header=header, model=arguments[1], title=header)
        elif origin is tuple:
            header = f"[[{name}]]"
            yield Table(name=name, header=header, model=arguments[0], title=header)
        else:
            assert isinstance(field.annotation, type)
            yield Table(name=name, header=f"[{name}]", model=field.annotation, title=f"[{name}]")
            for key, inner in _inner(field.annotation):
                header = f"[{name}.{key}.NAME]"
                yield Table(name=f"{name}.{key}", header=header, model=inner, title=header)


def _inner(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The keys of a table that are tables of a model by name."""
    for key, field in model.model_fields.items():
        arguments = get_args(field.annotation)
        inner = arguments[1] if get_origin(field.annotation) is dict else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield key, inner


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """What each key means. Of the bounds, the class that holds them says it."""
    return attribute_docstrings(Bounds if model is Waits else model)


def page() -> str:
    """The page."""
    written = [HEAD]
    for table in tables():
        written.append(f"## {table.title}\n\n{markdown(table.model.__doc__ or '')}\n")
        meaning = descriptions(table.model)
        rows = ["| key | takes | default | |", "| --- | --- | --- | --- |"]
        inner = dict(_inner(table.model))
        for key, field in table.model.model_fields.items():
            if key in inner:
                continue
            takes = kind_of(field.annotation, field.metadata)
            rows.append(f"| `{key}` | {takes} | {_default(field)} | {one_line(meaning[key])} |")
        written.append("\n".join(rows) + "\n")
    written.append(
        "## A file with everything\n\nNo installation needs all of it: a source, a destination "
        f"and `default_destination` suffice.\n\n```toml\n{EXAMPLE}```\n"
    )
    return "\n".join(written)


def kind_of(annotation: Any, metadata: Any = ()) -> str:
    """What a key takes, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0], (*arguments[1:], *metadata))
    if origin in (Union, types.UnionType):
        (one,) = (other for other in arguments if other is not type(None))
        return kind_of(one, metadata)
    if origin is Literal:
        return " or ".join(f'`"{one}"`' for one in arguments)
    if origin is dict:
        return "table of texts"
    if origin is tuple:
        return f"list: {kind_of(arguments[0])}"
    return " ".join([NAMES[annotation], *filter(None, map(_limit, metadata))])


def _limit(rule: object) -> str:
    if isinstance(rule, AfterValidator):
        said = getattr(rule.func, "__doc__", None) or ""  # a phrase, or what a function does
        return said if rule.func.__module__ != "pathlib" and "\n" not in said else ""
    if isinstance(rule, annotated_types.Ge):
        return f"from {rule.ge:,}"
    if isinstance(rule, annotated_types.Gt):
        return f"above {rule.gt:,}"
    if isinstance(rule, annotated_types.Le):
        return f"to {rule.le:,.0f}"
    return ""


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else None
    if value in (None, ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:,}`".replace(",", "_")


def missing() -> Iterator[str]:
    """The keys that the example lacks."""
    example = tomllib.loads(EXAMPLE)
    instead = set(re.findall(r"^# (\w+) = .*# instead of", EXAMPLE, re.MULTILINE))
    for table in tables():
        outer, _, inner = table.name.partition(".")
        there = example[outer][inner] if inner else example[outer]
        if table.header.startswith("[["):
            found = there
        else:
            found = list(there.values()) if table.header.endswith(".NAME]") else [there]
        if table.name in ("destinations", "sources"):
            kind = table.model.model_fields["kind"].default
            found = [one for one in found if one["kind"] == kind]
        keys = {key for one in found for key in one} | instead
        yield from (f"{table.title}: {key}" for key in table.model.model_fields if key not in keys)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
