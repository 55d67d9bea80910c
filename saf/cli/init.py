"""``saf init``: two databases, a first message, and a saf.toml that explains itself.

The first message is sent, forwarded and received, to show that the two databases are connected.
This process forwards it, because Spark would take longer to start than everything else takes. It is
sent only where nobody could mistake it for a real message: from an empty outbox to a broker without
services. A temporary subscription receives it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from uuid import UUID, uuid4

import typer

from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.broker.services import OWN, create_subscription, remove_subscription, services
from saf.cli.alive import announce, waiting
from saf.cli.console import echo
from saf.cli.schema import given, warn_of_search_path
from saf.config import DEFAULT_FILE, Settings, load
from saf.database import Dsn, fetch, unavailable_if_lost
from saf.errors import ConfigurationError, MissingExtra, SafError, SameBroker
from saf.outbox import Outbox

SOURCE, STORE = "shop", "mom"
"""The names of the two brokers in saf.toml."""

VERSION = "SELECT current_setting('server_version')"
LOCK = "SELECT pg_try_advisory_xact_lock(%(key)s)"

SERVICE = f"{OWN}init"
"""What the first message is addressed to."""
SENT = "SELECT EXISTS (SELECT FROM saf.outbox), EXISTS (SELECT FROM saf.route)"


def command(
    source: Annotated[
        str,
        typer.Option(envvar="SHOP_DSN", help="Source: the application's database, which sends."),
    ],
    store: Annotated[
        str, typer.Option(envvar="MOM_DSN", help="Store: the database where services read.")
    ],
    *,
    sender: Annotated[
        str | None,
        typer.Option(help="Role that sends: gets the rights of a writer at the source."),
    ] = None,
    forwarder: Annotated[
        str | None,
        typer.Option(help="Role that forwards: gets the rights of a forwarder at both."),
    ] = None,
    receiver: Annotated[
        str | None,
        typer.Option(help="Role that receives: gets the rights of a receiver at the store."),
    ] = None,
    config: Annotated[Path, typer.Option(help="File to write.")] = DEFAULT_FILE,
) -> None:
    """Set up two databases, and send a first message.

    It checks, migrates and grants, and writes saf.toml. Set the DSNs in the environment, as
    SHOP_DSN and MOM_DSN: saf.toml then holds no password. The login must own the databases, or be
    allowed to create a schema there. No file is overwritten, and no message is sent where others
    are pending.
    """
    if not os.access(f"{config.parent}/.", os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{config} cannot be written: {config.parent} is not a folder, or is not writable"
        )
    if config.exists():
        raise ConfigurationError(
            f"{config} exists and is not overwritten: choose another file by --config, or run "
            "`saf doctor` to examine this one"
        )
    places = {SOURCE: given(source, "--source"), STORE: given(store, "--store")}
    text = _file(places)
    _refuse_one(places)
    for name, dsn in places.items():
        _migrate(name, dsn)
    _refuse_copy(places)
    for role, kind, where in (
        (sender, Kind.WRITER, (SOURCE,)),
        (forwarder, Kind.FORWARDER, (SOURCE, STORE)),
        (receiver, Kind.RECEIVER, (STORE,)),
    ):
        for name in where if role else ():
            with places[name].connect(role="grant", autocommit=True) as connection:
                grant(connection, str(role), [kind])
            echo(f"{name}: role {role} is {kind}")
    with config.open("x", encoding="utf-8") as file:
        file.write(text)
    echo(
        f"wrote {config}: {SOURCE} is its source and {STORE} its destination; it explains the rest"
    )
    _send(config)


def _migrate(name: str, dsn: Dsn) -> None:
    """Check that a database answers, find out what it has, and bring its schema up to date."""
    with (
        unavailable_if_lost(f"database {dsn}"),
        dsn.connect(role="init", autocommit=True) as connection,
    ):
        ((version,),) = fetch(connection, VERSION)
    announce(f"migrating {name}")
    with waiting(f"migrating {name}"):
        done = migrate(dsn)
    change = "created" if done.before is None else f"was {done.before}"
    echo(
        f"{name}: database {dsn.database} on PostgreSQL {version}, saf schema {done.revision} "
        + (change if done.changed else "unchanged")
    )
    warn_of_search_path(dsn)


def _refuse_one(places: Mapping[str, Dsn]) -> None:
    """Raise if the DSNs lead to the same database: an advisory lock is its database's own."""
    key = {"key": secrets.randbits(63)}
    with ExitStack() as stack:
        for dsn in places.values():
            stack.enter_context(unavailable_if_lost(f"database {dsn}"))
            connection = stack.enter_context(dsn.connect(role="init"))
            ((free,),) = fetch(connection, LOCK, key)
            if not free:
                raise ConfigurationError(
                    "both DSNs lead to the same database: messages go from one to another"
                )


def _refuse_copy(places: Mapping[str, Dsn]) -> None:
    """Raise if one of the databases is a copy of the other."""
    identities: dict[UUID, str] = {}
    for name, dsn in places.items():
        with dsn.connect(role="init", autocommit=True) as connection:
            ((broker_id,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        if (other := identities.setdefault(broker_id, name)) != name:
            raise SameBroker(name, other, broker_id)


def _file(places: dict[str, Dsn]) -> str:
    """Return the commented saf.toml, with the DSNs that are not in the environment."""
    text = _template().read_text(encoding="utf-8")
    for name, dsn in places.items():
        variable = f"{name.upper()}_DSN"
        if _said_by(variable) == dsn.conninfo:
            continue
        if dsn.parts.get("password"):
            raise ConfigurationError(
                f"the DSN of {name} holds a password, which must not be in saf.toml: export it as "
                f"{variable}, and run `saf init` without it"
            )
        text = text.replace(f'dsn = "${{{variable}}}"', f"dsn = {json.dumps(str(dsn))}")
    return text


def _said_by(variable: str) -> str | None:
    """Return libpq's form of a DSN in the environment; None if it is unset or invalid."""
    try:
        return Dsn(os.environ[variable]).conninfo
    except (KeyError, ConfigurationError):
        return None


def _template() -> Path:
    """Return jobs/saf.toml in a checkout, or the copy in the installed package."""
    package = Path(__file__).parents[1]
    in_wheel = package / "saf.toml"
    return in_wheel if in_wheel.is_file() else package.parent / "jobs" / "saf.toml"


def _send(config: Path) -> None:
    settings = load(config)
    try:
        against = _reason_against(settings)
        if against is None:
            with waiting("sending a first message"):
                seconds = _send_first(settings)
            echo(
                f"sent a message at {SOURCE}, forwarded it, received it at {STORE}: {seconds:.1f} s"
            )
    except MissingExtra as missing:
        against = str(missing)
    if against is not None:
        echo(f"sent no first message: {against}")
    echo(
        "next: `saf service create NAME`, send to NAME in a transaction (README.md), `saf forward`"
    )


def _reason_against(settings: Settings) -> str | None:
    """Return the reason not to send a first message; None if it may be sent.

    Raises:
        MissingExtra: the packages for forwarding are not installed.
    """
    if find_spec("adbc_driver_postgresql") is None or find_spec("pyarrow") is None:
        raise MissingExtra("forwarder", "forwarding it")
    with settings.brokers[SOURCE].dsn.connect(role="init", autocommit=True) as connection:
        ((messages, routes),) = fetch(connection, SENT)
    with _store(settings).connect(role="init", autocommit=True) as connection:
        served = bool(services(connection))
    if messages or routes:
        return f"the outbox of {SOURCE} is in use"
    return f"{STORE} has services" if served else None


def _send_first(settings: Settings) -> float:
    """Send, forward and receive one message; return the seconds that this took.

    Raises:
        SafError: the message has not arrived; the error has the reasons.
    """
    from saf.forwarding.forwarder import Forwarder
    from saf.forwarding.runner import InProcess
    from saf.receiving.receive import receive

    destination = _store(settings)
    reader = f"{SERVICE}/{uuid4()}"
    started = time.monotonic()
    with destination.connect(role="init", autocommit=True) as connection:
        create_subscription(connection, reader, service=None, start="now")
    try:
        with settings.brokers[SOURCE].dsn.connect(role="init") as connection:
            sent = Outbox().send(connection, SERVICE, "the first message")
        summary = Forwarder(settings, InProcess()).drain()
        with receive(destination, reader) as delivery:
            arrived = [message.message_id for message in delivery]
    finally:
        with destination.connect(role="init", autocommit=True) as connection:
            remove_subscription(connection, reader, discard=True)
    if sent not in arrived:
        errors = [problem["error"] for problem in (*summary.problems, *summary.waiting)]
        raise SafError(
            f"the first message did not arrive: {'; '.join(errors) or 'for an unknown reason'}"
        )
    return time.monotonic() - started


def _store(settings: Settings) -> Dsn:
    dsn = settings.destinations[STORE].broker()
    assert dsn is not None  # noqa: S101 - `saf init` writes a broker as destination
    return dsn
