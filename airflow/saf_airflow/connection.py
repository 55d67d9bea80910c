"""The hook, and Airflow's connections: of saf itself, and of the databases that saf.toml names.

A connection of type ``saf`` has the location of the command and its settings, in these fields of
its extra:

    command       path of the command saf
    config        path of its saf.toml
    environment   variables, by name
    connections   variables that get the DSN of another Airflow connection: its id by the name

With ``{"SHOP_DSN": "shop_db"}`` in ``connections``, the connection ``shop_db`` of type Postgres is
the variable SHOP_DSN, which saf.toml names: ``dsn = "${SHOP_DSN}"``. For a connection of another
type, the variable is its URI.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from saf_airflow.command import MEND, Saf, end, finish

if TYPE_CHECKING:
    from airflow.sdk import Connection

FIELDS = ("command", "config", "environment", "connections")
MAPPINGS = ("environment", "connections")

POSTGRES = ("postgres", "postgresql")
"""Connection types that are a DSN."""

OF_AIRFLOW = {
    *("aws_conn_id", "azure_conn_id", "cluster-identifier", "cursor", "iam", "redshift"),
    *("redshift-serverless", "sqlalchemy_query", "sqlalchemy_scheme", "workgroup-name"),
}
"""What the extra of a Postgres connection may have for Airflow's hook, and not for libpq."""


class SafHook(BaseHook):
    """Runs the command ``saf`` as a connection describes it.

        SafHook("saf").run("purge", "--json")

    Args:
        saf_conn_id: a connection of type ``saf``.
    """

    conn_name_attr = "saf_conn_id"
    default_conn_name = "saf_default"
    conn_type = "saf"
    hook_name = "saf (store and forward)"

    def __init__(self, saf_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.saf_conn_id = saf_conn_id

    def get_conn(self) -> Saf:
        """Return the command, with the DSNs of its connections as variables.

        Raises:
            ValueError: the connection has unknown fields, or names a connection without a DSN.
        """
        return resolved(of_connection(self.get_connection(self.saf_conn_id)))

    def run(self, *arguments: str) -> dict[str, Any]:
        """Run a command of saf to its end; return the JSON of its last line, if it prints JSON.

        Raises:
            OSError: the command cannot be started.
            AirflowFailException: an operator must fix something: the connection, or exit code 2.
            AirflowException: any other exit code but 0.
        """
        try:
            saf = self.get_conn()
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
        process = saf.start(*arguments)
        try:
            done = finish(process, lambda line: self.log.info("%s", line))
        except BaseException:
            end(process.pid, signal.SIGTERM)
            raise
        if done.code:
            error = AirflowFailException if done.code == MEND else AirflowException
            words = " ".join(("saf", *arguments))
            raise error(f"{words} has ended with exit code {done.code}: {done.errors}")
        return done.said

    def test_connection(self) -> tuple[bool, str]:
        """Ask each outbox for one message: it answers, or the reason is returned."""
        try:
            saf = self.get_conn()
            done = asyncio.run(saf.ask("outbox", "list", "--limit", "1", "--json"))
        except (OSError, TimeoutError, ValueError) as error:
            return False, str(error)
        if done.code:
            errors = [f"{row['broker']}: {row['error']}" for row in done.said.get("errors", ())]
            return False, "; ".join(errors) or done.errors
        return True, "all brokers of saf.toml answer"


def located(
    saf: Saf | None,
    connection_id: str | None,
    *,
    config: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Saf:
    """Return the given command, a connection's, or the default; with some settings replaced.

    Raises:
        AirflowFailException: the connection is not one of saf.
    """
    if connection_id is None:
        found = saf or Saf()
    else:
        try:
            found = of_connection(BaseHook.get_connection(connection_id))
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
    return settled(found, config, environment)


def settled(saf: Saf, config: str | None, environment: Mapping[str, str] | None) -> Saf:
    """Return a command with another saf.toml, if given, and more variables."""
    return replace(
        saf,
        config=config or saf.config,
        environment={**saf.environment, **(environment or {})},
    )


def of_connection(connection: Connection) -> Saf:
    """Return the command that a connection describes.

    Raises:
        ValueError: its extra has an unknown field, or a field of another type.
    """
    where = f"connection {connection.conn_id!r}: its extra"
    extra = connection.extra_dejson
    if unknown := sorted(set(extra) - {*FIELDS}):
        raise ValueError(f"{where} has {', '.join(unknown)}; it may have {', '.join(FIELDS)}")
    # the form stores empty fields without a value
    given = {name: value for name, value in extra.items() if value not in (None, "")}
    for name, value in given.items():
        if name in MAPPINGS:
            given[name] = _mapping(f"{where} has {name}", value)
        elif not isinstance(value, str):
            raise ValueError(f"{where} has {name} {value!r}: it must be a path")
    return Saf(**given)


def _mapping(what: str, value: Any) -> dict[str, str]:
    """Return variables, which may also be JSON in a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f'{what}, which must be JSON such as {{"NAME": "value"}}') from None
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError(f'{what}, which must be strings by name: {{"NAME": "value"}}')
    return dict(value)


def resolved(saf: Saf) -> Saf:
    """Return a command with the DSNs of its connections as variables; for a task."""
    found = {name: BaseHook.get_connection(id_) for name, id_ in saf.connections.items()}
    return _with(saf, found)


async def aresolved(saf: Saf) -> Saf:
    """Return the same, for a trigger, whose event loop must not wait."""
    found = {name: await BaseHook.aget_connection(id_) for name, id_ in saf.connections.items()}
    return _with(saf, found)


def _with(saf: Saf, found: Mapping[str, Connection]) -> Saf:
    dsns = {name: dsn(connection) for name, connection in found.items()}
    return replace(saf, environment={**saf.environment, **dsns}, connections={})


def dsn(connection: Connection) -> str:
    """Return a connection as the URL that saf.toml expects: of a Postgres connection, its DSN.

    The fields of a Postgres connection's extra are parameters of libpq, such as ``sslmode``, except
    those of Airflow's own hook.

    Raises:
        ValueError: the connection lacks a password, or libpq cannot take a field.
    """
    if connection.conn_type not in POSTGRES:
        return str(connection.get_uri())
    extra = connection.extra_dejson
    where = f"connection {connection.conn_id!r}: its extra"
    if extra.get("iam"):
        raise ValueError(f"{where} has iam: saf needs a password, or a certificate")
    parameters = {}
    for name, value in extra.items():
        if name in OF_AIRFLOW:
            continue
        if not isinstance(value, str | int | float):
            raise ValueError(  # noqa: TRY004 - a value of the connection, as the other errors
                f"{where} has {name}, which must be a string or a number for libpq"
            )
        parameters[name] = str(int(value) if isinstance(value, bool) else value)
    login = quote(connection.login or "", safe="")
    password = f":{quote(connection.password, safe='')}" if connection.password else ""
    host = quote(connection.host or "", safe=",:[]")
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    port = f":{connection.port}" if connection.port else ""
    database = quote(connection.schema or "", safe="")
    query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
    at = "@" if login or password else ""
    return f"postgresql://{login}{password}{at}{host}{port}/{database}{query}"
