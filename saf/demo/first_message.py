"""The first message: sent, forwarded and received, to show that two databases are connected.

This process forwards it, because Spark would take longer to start than everything else takes. It is
sent only where nobody could mistake it for a real message: from an empty outbox to a broker without
services. A temporary subscription receives it.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from uuid import uuid4

from saf.broker.services import OWN, create_subscription, remove_subscription, services
from saf.config import Settings
from saf.database import Dsn, fetch
from saf.errors import MissingExtra, SafError
from saf.outbox import Outbox

SERVICE = f"{OWN}init"

SENT = "SELECT EXISTS (SELECT FROM saf.outbox), EXISTS (SELECT FROM saf.route)"


def reason_against(settings: Settings, source: str, store: str) -> str | None:
    """Return the reason not to send a first message; None if it may be sent.

    Raises:
        MissingExtra: the packages for forwarding are not installed.
    """
    if find_spec("adbc_driver_postgresql") is None or find_spec("pyarrow") is None:
        raise MissingExtra("forwarder", "forwarding it")
    with settings.brokers[source].dsn.connect(role="init", autocommit=True) as connection:
        ((messages, routes),) = fetch(connection, SENT)
    with _store(settings, store).connect(role="init", autocommit=True) as connection:
        served = bool(services(connection))
    if messages or routes:
        return f"the outbox of {source} is in use"
    return f"{store} has services" if served else None


def send_first(settings: Settings, source: str, store: str) -> float:
    """Send, forward and receive one message; return the seconds that this took.

    Raises:
        SafError: the message has not arrived; the error has the reasons.
    """
    from saf.forwarding.forwarder import Forwarder
    from saf.forwarding.runner import InProcess
    from saf.receiving.receive import receive

    destination = _store(settings, store)
    reader = f"{SERVICE}/{uuid4()}"
    started = time.monotonic()
    with destination.connect(role="init", autocommit=True) as connection:
        create_subscription(connection, reader, service=None, start="now")
    try:
        with settings.brokers[source].dsn.connect(role="init") as connection:
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


def _store(settings: Settings, name: str) -> Dsn:
    dsn = settings.destinations[name].broker()
    assert dsn is not None  # noqa: S101 - `saf init` writes a broker as destination
    return dsn
