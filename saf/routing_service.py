"""Routing service: serves a router, as an ordinary service in its own broker.

    RoutingService(engine, "departures").run()        # or: saf router serve departures

Messages for the router reach its broker by a route, like those of any service. Here they are
classified and sent on in the transaction that receives them: exactly once and in order, whatever
fails. Any number of replicas share the work, as all receivers do.

- A message outside of a dialog is sent on unchanged to the resolved service, with an id computed
  from its own: the same message always gets the same new id. So a signature no longer matches; it
  travels inside the message that is sent on (`saf.signing.origin`). If the service has a signer,
  it signs that message.
- A router that forwards begins a second dialog with the first message of a dialog, from the router
  to the resolved service. All messages of either dialog, including replies, Ends and Errors, are
  passed on in the other (`saf.dialogs.passing`).
- A router that redirects passes all messages on as they are, those of dialogs too. Initiator and
  target then speak without it (`saf.dialogs.redirecting`).
- A message that cannot be resolved becomes a dead letter with the reason. If it begins a dialog,
  the dialog ends with an error, which its initiator gets.
- A message that has come by more than `MAX_HOPS` routing services is treated in the same way.
- A classifier that is a function of the database is called in this transaction, once for all
  messages of a delivery, so its writes commit with them. For a message that is tried again, it is
  called again.

The router, and the services that routes lead to, are read with each delivery, so a change takes
effect at the next delivery. A deployment mistake stops the service instead: the router does not
exist, has another mode than before, or its function cannot be imported or called. Then nothing has
been received.

Needs Arrow, as the forwarder does, but not Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from saf.columns import SENT
from saf.database import queries
from saf.dialogs import redirecting
from saf.dialogs.arrival import end_too
from saf.dialogs.endpoints import columns
from saf.dialogs.passing import begin_partner, partner, pass_on
from saf.dialogs.statements import COMPARE, DIRECT, END, ERROR, TIMER, Code
from saf.engine.classifying import as_table
from saf.engine.resolving import Matcher, Resolver
from saf.errors import ConfigurationError, Unavailable, UnreadableHeaders
from saf.message import DEFAULT_MAX_BYTES, HOPS, MAX_HOPS, ORIGIN, SIGNATURE, Number, Row, as_json
from saf.received import Received
from saf.receiving.delivery import Delivery
from saf.receiving.link import connected
from saf.receiving.loop import Loop
from saf.receiving.retries import Policy
from saf.receiving.savepoints import Savepoints
from saf.receiving.stopping import STOP_SECONDS
from saf.routing import functions
from saf.routing.matching import FORWARD, FUNCTION, REDIRECT, SQL
from saf.routing.resolved import Resolved, keep, resolved
from saf.routing.routers import load
from saf.routing.routes import NOTHING, Declared, configuration, router_in_force
from saf.setaside.dropped import Reason
from saf.setaside.parking import ADDRESS
from saf.signing.origin import envelope, is_signed, passed
from saf.telemetry.tracing import processing
from saf.transaction import enter

if TYPE_CHECKING:
    from saf.receiving.link import Engine, Link
    from saf.receiving.receive import Receiver
    from saf.signing.signer import Key, RequireSigned, Signer

SENT_ON = {
    **{name: type_ for name, type_ in SENT.items() if name != "deliver_at"},
    "conversation_id": "uuid",
    "sequence": "bigint",
}
# Also what says which end of a dialog has sent a message; its lifetime counts from created_at
REDIRECT_ON = {**SENT_ON, "from_initiator": "boolean", "created_at": "timestamptz"}


def _insert(columns: Mapping[str, str]) -> str:
    values = ", ".join(f"%({name})s::{type_}[]" for name, type_ in columns.items())
    return f"INSERT INTO saf.outbox ({', '.join(columns)}) SELECT * FROM unnest({values})"


SEND_ON = {
    FORWARD: (_insert(SENT_ON), SENT_ON),
    REDIRECT: (_insert(REDIRECT_ON), REDIRECT_ON),
}
"""Statement that sends messages on, and its columns, by the router's mode."""


@dataclass(frozen=True, kw_only=True)
class InTransaction:
    """Reads and writes resolutions in an open transaction."""

    connection: psycopg.Connection[Any]

    def resolved(self, router: str, keys: Collection[str]) -> Mapping[str, Resolved]:
        """Return the stored resolutions of these keys."""
        return resolved(self.connection, router, keys)

    def keep(self, router: str, new: Mapping[str, Resolved]) -> Mapping[str, Resolved]:
        """Store new resolutions; return those that count for these keys from now on."""
        return keep(self.connection, router, new)


class RoutingService(Loop):
    """Serves one router.

    Args:
        engine: the broker where the router's service lives; as for `saf.receive`.
        router: the router's name, which is also the name of its service and its subscription.
        default_destination: where this broker's forwarder sends messages that no route matches.
        declared: routes, topics and routers of saf.toml, if it declares any.
        max_messages: most messages in one transaction.
        threads: deliveries that this process handles at a time.
        policy: treatment of messages that cannot be sent on.
        listen: be notified when messages arrive; see `saf.receiving.link`.
        stop_timeout: seconds that the messages in hand may take after SIGTERM, SIGINT or `stop`;
            then they are rolled back, and `run` raises `StopTimeout`.
        require_signed: send on only messages that are signed by one of the ``keys``; as for
            `saf.receive`.
        keys: the keys that senders sign with; as for `saf.receive`.
        signer: signs messages that are sent on. The original signature travels inside.

    Raises:
        UsageError: a number is out of range, or there are no keys to verify with.
    """

    def __init__(
        self,
        engine: Engine,
        router: str,
        *,
        default_destination: str | None = None,
        declared: Declared = NOTHING,
        max_messages: int = 100,
        threads: int = 1,
        policy: Policy | None = None,
        listen: bool = False,
        stop_timeout: float = STOP_SECONDS,
        require_signed: RequireSigned = False,
        keys: Mapping[str, Key] | None = None,
        signer: Signer | None = None,
    ) -> None:
        super().__init__(
            engine,
            router,
            max_messages=max_messages,
            threads=threads,
            policy=policy,
            listen=listen,
            stop_timeout=stop_timeout,
            require_signed=require_signed,
            keys=keys,
            signer=signer,
        )
        self.default_destination = default_destination
        self.declared = declared
        self._mode: str | None = None
        """Mode of the router when the service began; None: its database has not answered yet."""

    def _check(self) -> None:
        # if the database does not answer, the loop tries again, as for any worker
        with suppress(Unavailable), connected(self.engine) as link, link.transaction():
            self._resolver(link.raw)

    @contextmanager
    def _receiving(self, link: Link) -> Iterator[Receiver]:
        if self._mode is None:
            with link.transaction():
                self._resolver(link.raw)
        with super()._receiving(link) as receiver:
            receiver.reader = replace(receiver.reader, passes=self._mode == REDIRECT)
            yield receiver

    def _handle(self, delivery: Delivery[Any], work: Savepoints) -> None:
        # messages that are sent on keep their original trace context
        with processing(self.subscription, delivery):
            self._route(delivery, work)

    def _route(self, delivery: Delivery[Any], work: Savepoints) -> None:
        raw, begins = work.raw, [one for one in delivery if self._begins(one)]
        errors = {one.id: why for one in begins if (why := self._too_far(one))}
        with work.piece():  # its writes stay if a message cannot be sent on
            found = self._resolve(work, [one for one in begins if one.id not in errors], errors)
        plain = []
        for message in delivery:
            if message.id in errors:
                self._refuse(delivery, work, message, errors[message.id])
            elif message.dialog is None:
                plain.append(message)  # a router that redirects has no ends
            else:
                call = partial(_go_on, raw, delivery, message, found.get(message.id))
                self._one(delivery, work, message, call)
        try:
            with work.piece():
                self._send_on(raw, plain, found)
        except Exception:
            if raw.broken:
                raise
            for message in delivery.still(plain):
                call = partial(self._send_on, raw, [message], found)
                self._one(delivery, work, message, call)

    def _resolve(
        self, work: Savepoints, messages: list[Received], errors: dict[int, str]
    ) -> dict[int, Resolved]:
        """Return the resolutions of messages by id; add the reasons of failures to ``errors``."""
        if not messages:
            return {}
        rows = as_table(map(_as_begun, messages))
        resolution = self._resolver(work.raw, work.own).resolve(rows)
        for dead, error in resolution.dead:
            errors |= dict.fromkeys(dead["id"].to_pylist(), error)
        return {
            row["id"]: Resolved(
                service=row["to_service"],
                broker=UUID(bytes=row["to_broker"]) if row["to_broker"] else None,
                key=row["key"],
            )
            for row in resolution.rows.select(["id", *ADDRESS]).to_pylist()
        }

    def _resolver(self, raw: psycopg.Connection[Any], own: str = "") -> Resolver:
        """Return the resolver for this router, as it is configured now.

        ``own`` is the statement that restores saf's own settings after a function of the database.
        """
        current = configuration(raw, self.default_destination, self.declared)
        found = router_in_force(current, self.subscription)
        if found is None:
            raise ConfigurationError(
                f"database {raw.info.dbname!r} has no router {self.subscription!r}, or it is "
                f"disabled: run `saf router add {self.subscription}`"
            )
        router = found.router
        if router.kind == SQL:
            raise ConfigurationError(
                f"router {router.service!r} is in SQL, which needs Spark: a router that is served "
                "has a classifier in Python, Arrow, or a function of its database"
            )
        self._keep_mode(raw, found.mode)
        classify = None
        if router.kind == FUNCTION:
            functions.check(raw, router, calls=True)
            classify = partial(functions.call, raw, router, own=own)
        else:
            load(router)
        routes = current.in_force
        return Resolver(
            [router],
            Matcher(routes),
            InTransaction(connection=raw),
            further=[entry.service for entry in routes.routers],
            classify=classify,
        )

    def _keep_mode(self, raw: psycopg.Connection[Any], mode: str) -> None:
        """Check that a router has the mode by which its open dialogs have begun.

        Raises:
            ConfigurationError: the mode has changed, and some dialogs are still open.
        """
        if mode == self._mode:
            return
        redirects, forwards = redirecting.passing(raw, self.subscription)
        others = forwards if mode == REDIRECT else redirects
        before = FORWARD if mode == REDIRECT else REDIRECT
        if others:
            raise ConfigurationError(
                f"router {self.subscription!r} has the mode {mode}, and {others:,} of its dialogs "
                f"have begun when it was {before}: serve it with --mode {before} until they have "
                "ended, or give the new mode to a router with another name"
            )
        if self._mode is not None:
            raise ConfigurationError(
                f"router {self.subscription!r} has the mode {mode} now, not {self._mode}: start "
                "its routing service again"
            )
        self._mode = mode

    @property
    def _redirects(self) -> bool:
        return self._mode == REDIRECT

    def _begins(self, message: Received) -> bool:
        """Return whether a message needs a resolution.

        A router that redirects looks for the resolution of each message.
        """
        if self._redirects:
            return message.message_type != DIRECT or message.from_initiator is None
        return message.dialog is None or _is_first(message)

    def _refuse(
        self, delivery: Delivery[Any], work: Savepoints, message: Received, error: str
    ) -> None:
        """Make a dead letter of a message; if it begins a dialog, tell the initiator."""
        with work.piece():
            if (dialog := message.dialog) is not None:
                dialog.fail(enter(work.raw), Code.UNRESOLVED, error, ending=True)
            elif self._redirects and message.from_initiator:
                redirecting.tell(work.raw, message, self.subscription, error)
        if message.message_type != COMPARE or dialog is not None:
            delivery.reject(message, error, reason="unresolved")

    def _send_on(
        self, raw: psycopg.Connection[Any], messages: list[Received], found: Mapping[int, Resolved]
    ) -> None:
        """Send messages of no end here, in their order, to the services they were resolved to."""
        if self._redirects:
            redirecting.remember(raw, self.subscription, messages)
            messages = [message for message in messages if message.id in found]
        if messages:
            statement, names = SEND_ON[REDIRECT if self._redirects else FORWARD]
            rows = [self._row(message, found[message.id]) for message in messages]
            raw.execute(statement, queries.in_arrays(raw, columns(names, rows)))

    def _row(self, message: Received, to: Resolved) -> dict[str, Any]:
        """Return the columns of a message that is sent on."""
        row = message.stored()
        row |= {"to_service": to.service, "to_broker": to.broker, "key": to.key}
        if self._redirects:
            return row | {"headers": as_json(redirecting.headers(message, self.subscription))}
        row |= {
            "message_id": passed(message.message_id, [self.subscription]),
            "headers": as_json(self._headers(message, to)),
        }
        return row if self.signer is None else row | _signed(self.signer, row)

    def _headers(self, message: Received, to: Resolved) -> dict[str, Any]:
        """Return the headers to send on; a signature becomes the origin, because the id differs."""
        headers = message.exact_headers
        kept = {n: value for n, value in headers.items() if n not in (SIGNATURE, ORIGIN)}
        # the signature covers the key
        if is_signed(message) and to.key == message.key:
            sealed = envelope(message, headers, self.subscription)
            kept |= {} if sealed is None else {ORIGIN: sealed}
        return {**kept, HOPS: _hops(message)}

    def _too_far(self, message: Received) -> str | None:
        """Return why a message has come by too many routing services; None if it has not."""
        before = redirecting.redirected_by(message) if self._redirects else None
        if before is not None:
            return (
                f"router {self.subscription!r}: router {before!r} has redirected it, and a message "
                "is redirected once: a router behind another one forwards"
            )
        if _hops(message) > MAX_HOPS:
            return f"router {self.subscription!r}: more than {MAX_HOPS} routing services in a row"
        return None


def _signed(signer: Signer, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers of a message that is sent on, with a new signature."""
    sent = Row(**{name: row[name] for name in Row._fields} | {"deliver_at": None})
    conversation_id = row["conversation_id"] and str(row["conversation_id"])
    signed = signer.sign(sent, conversation_id=conversation_id, sequence=row["sequence"])
    return {"headers": signed.headers}


def _is_first(message: Received) -> bool:
    """Return whether a message is the first of a dialog."""
    return bool(message.from_initiator and message.first_sequence == 1)


def _as_begun(message: Received) -> dict[str, Any]:
    """Return the whole message, to classify it; without a body that is too large for memory."""
    return message.stored() | {
        "to_broker": None,  # it was addressed to this broker
        "sequence": message.first_sequence,
        "body": message.body if message.size <= DEFAULT_MAX_BYTES else b"",
    }


def _hops(message: Received) -> int:
    """Return the number of routing services that a message has come by, including this one."""
    try:
        before = message.exact_headers[HOPS]
    except (UnreadableHeaders, LookupError):
        before = None
    # any sender may have written this: a negative number, or one too long for Python
    return (int(before[:9]) if isinstance(before, Number) and before.isdecimal() else 0) + 1


def _go_on(
    raw: psycopg.Connection[Any], delivery: Delivery[Any], message: Received, to: Resolved | None
) -> None:
    """Pass a message on in its second dialog; begin that dialog for the first message."""
    dialog = message.dialog
    assert dialog is not None  # noqa: S101 - the caller has checked
    done = message.message_type in (END, ERROR, TIMER)
    if to is not None:
        other = begin_partner(raw, dialog, to, signed=is_signed(message))
        done = pass_on(raw, message, dialog, other, **{HOPS: _hops(message)})
    elif known := partner(raw, dialog):
        done = pass_on(raw, message, dialog, known)
    elif message.message_type in (END, ERROR):
        end_too(dialog, raw)  # the end of its second dialog may have been handled before
    if not done:
        delivery.drop(message, Reason.ENDED)
