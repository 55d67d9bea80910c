"""All errors that saf raises on purpose.

    SafError
    ├── UsageError                this cannot be done: fix the call, the file or the database
    │   ├── ConfigurationError    saf.toml, an option or an environment variable
    │   │   └── EndpointRemoved   an endpoint is no longer stored in its broker as it was
    │   ├── TookTooLong           an answer took longer than the caller allows
    │   ├── InvalidMessage        a message that no broker would store
    │   ├── AutocommitError       a send that would not be part of the caller's transaction
    │   ├── MissingExtra          an optional dependency is not installed
    │   ├── NotThisStream         a stream's subscription and its checkpoint do not match
    │   ├── CannotReadBack        the contents of a destination cannot be read
    │   ├── MemberMissing         a fleet no longer lists a member known before
    │   ├── SameBroker            two databases have one broker_id
    │   ├── Braked                a destination has rejected too many messages in a row
    │   ├── DialogError           a dialog is at fault, or the request to it
    │   │   ├── NoSuchService     the service that begins a dialog does not live here
    │   │   ├── NoSuchContract    the contract is not known here
    │   │   ├── DialogNotFound    no conversation has this handle
    │   │   ├── DialogElsewhere   the handle belongs to another database
    │   │   ├── DialogEnded       one of the two ends has ended, or the dialog failed
    │   │   ├── DialogExpired     the dialog's lifetime is over
    │   │   ├── DialogFailed      a wait has met the dialog's Error
    │   │   ├── UnexpectedMessage a wait has met a message of another type
    │   │   └── ContractViolation the contract does not allow the message
    │   │       ├── TypeNotInContract
    │   │       ├── WrongDirection
    │   │       └── SchemaViolation
    │   └── SchemaError           the database is not a broker that this version can use
    │       ├── SchemaMissing     no ``saf`` schema: run ``saf migrate``
    │       ├── SchemaMismatch    older or newer than this library
    │       ├── RowsGone          saf's own rows were deleted, or never copied
    │       └── Restored          from another cluster or an older state: run ``saf rebase``
    ├── StopTimeout               a worker did not finish in time after a stop request
    ├── Unavailable               a service does not answer: nothing is lost, try again later
    │   ├── DiskFull              the server's disk is full: nothing is lost, free space
    │   ├── Faulty                a destination's client failed; no message is to blame
    │   └── Refused               a service rejects this login: nothing is lost, fix it
    ├── Unexpected                an unknown failure of one broker: the others continue
    ├── PurgedMeanwhile           a purge has taken rows of a planned read: read again
    ├── JobFailed                 a Spark job failed, e.g. a worker was killed; it is retried
    ├── SparkGone                 Spark itself has ended: the next run continues
    ├── UnknownService            a destination does not know the addressed services
    ├── AnotherBroker             messages are addressed to another broker
    ├── Paused                    an operator has paused a destination
    ├── NoDialogs                 a destination takes no messages of dialogs
    ├── Unroutable                no route and no default destination for a service
    ├── Rejected                  a destination does not accept a message
    ├── UnreadableBody            a received body does not match its content type
    ├── UnreadableHeaders         Python cannot read the received headers
    ├── UndecodableEvent          a received body does not match its event's class
    ├── NewerEvent                a received body has a newer version than the event here
    ├── NotCorrelated             a message fits no process of its saga
    ├── UnreadableState           the stored state of a process does not match its class
    ├── NotVerified               a webhook's signature is wrong or too old
    ├── Ahead                     a destination knows more of a source than the source itself
    ├── Behind                    a destination knows less of a source than it has acknowledged
    ├── SourceRefused             a source must not be read on: run ``saf source continue``
    │   ├── SourceSetBack         its topic ends before messages that were read
    │   ├── TopicMadeAgain        its topic was deleted, and maybe made again
    │   ├── RetentionPassed       its topic has lost messages before they were read
    │   └── SourceChanged         saf.toml names another topic for it
    ├── StagedLost                messages that a Spark job has staged are gone
    ├── StreamSetBack             a database knows less of a stream than the stream's checkpoint
    ├── StreamTakenOver           a newer Spark query reads with a stream's subscription
    └── Fenced                    another owner has taken over: stop writing

An error's text names the value at fault and the next step, and never contains a password. Programs
tell errors apart by class, and find the value at fault in the attributes.
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID

HIDDEN = "••••••"
"""Placeholder for a hidden value."""

QUOTED = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"(Failing row contains \().*(\))", re.S),
        (r"(Key \(.*?\)=\().*(\))", re.S),
        (r"(COPY \S+, line \d+, column \S+: \").*(\")", re.S),
        (r"(JSON data, line \d+: ).*()", re.S),
        (r"(\binput_value=).*(, input_type=)", 0),
    )
)
"""Places where PostgreSQL and pydantic quote a row, a key, a column or a value in an error. The
quote is hidden up to its last possible end, because a quoted value may look like the end."""

NAMED = 10
"""Most values that one error names."""


REFILL = (
    "If it is being restored, wait for its end; else restore it from a backup. Where no message "
    "matters, as in a test, DROP SCHEMA saf CASCADE and run `saf migrate`; and let what empties "
    "tables leave out schema saf"
)
"""Next step where saf's own rows are gone."""


class SafError(Exception):
    """Base of all errors that saf raises on purpose."""

    exit_code = 1
    needs_operator = False
    """True if no retry succeeds before an operator has changed something."""

    def __str__(self) -> str:
        """Return the text, without message data that a library has quoted."""
        return masked(super().__str__())


class UsageError(SafError):
    """The request cannot be fulfilled as it stands; a retry will not help."""

    exit_code = 2
    needs_operator = True


class ConfigurationError(UsageError):
    """A setting is missing, unknown or wrong."""


class EndpointRemoved(ConfigurationError):
    """An endpoint was removed from its broker, or another endpoint has its name now."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"endpoint {name!r} was removed from its broker, or has another URL or subscription now"
        )


class MayNotPurge(UsageError):
    """The role lacks the purger grant, which a forwarder does not need."""


class TookTooLong(UsageError):
    """An answer took longer than the caller allows: ask for less, or allow more."""


class InvalidMessage(UsageError, ValueError):
    """A message that no broker would store.

    ``field`` names the argument at fault, ``path`` leads to the value in it, and ``item`` is the
    number of the message among several.
    """

    def __init__(
        self, field: str, problem: str, *, path: str | None = None, item: int | None = None
    ) -> None:
        super().__init__(f"{'' if item is None else f'messages[{item}].'}{field}: {problem}")
        self.field = field
        self.problem = problem
        self.path = path or field
        self.item = item

    def of_item(self, number: int) -> InvalidMessage:
        """Return the same error for one of several messages."""
        return InvalidMessage(self.field, self.problem, path=self.path, item=number)


class AutocommitError(UsageError):
    """The connection commits each statement separately, so the message would not be atomic."""

    def __init__(self, done: str = "sent") -> None:
        super().__init__(
            "this connection is in autocommit and no transaction is open: the message would be "
            f"{done} even if your business transaction rolls back. Open a transaction first "
            "(with conn.transaction(): …, in Django with transaction.atomic(): …), or use "
            "Outbox(allow_autocommit=True) if that is intended"
        )


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs more packages: pip install 'saf-outbox[{extra}]', or in a clone of "
            f"saf pip install '.[{extra}]'"
        )
        self.extra = extra
        self.purpose = purpose


class CannotReadBack(UsageError):
    """A destination's contents cannot be read, so its missing messages are unknown."""

    def __init__(self, destination: str, why: str) -> None:
        super().__init__(f"destination {destination!r} is not compared: {why}")
        self.destination = destination
        self.why = why


class Braked(UsageError):
    """A destination has rejected too many messages in a row, so it gets no more.

    An operator fixes the cause and runs `saf parked retry-now`.
    """

    def __init__(self, destination: str, messages: int, reason: str) -> None:
        super().__init__(
            f"destination {destination!r} has rejected {messages} messages in a row, so nothing "
            f"more is sent to it; the last reason: {reason}. Fix the cause, then run "
            f"`saf parked retry-now --destination {shlex.quote(destination)}`"
        )
        self.destination = destination
        self.messages = messages


class SameBroker(UsageError):
    """Two databases have the same broker_id: one is a copy of the other."""

    def __init__(self, copy: str, original: str, broker_id: UUID) -> None:
        super().__init__(
            f"brokers {original!r} and {copy!r} are two databases with one broker_id, {broker_id}: "
            f"{copy!r} is a copy (CREATE DATABASE … TEMPLATE, or a copied data directory), and is "
            f"not forwarded. Run `saf broker new-id --broker {shlex.quote(copy)}`; nothing was set "
            "back, so `saf rebase` does not help"
        )
        self.copy = copy
        self.original = original
        self.broker_id = broker_id


class MemberMissing(UsageError):
    """A member of a fleet was forwarded before, and its fleet no longer lists it."""

    def __init__(self, fleet: str, member: str, *, closed: bool) -> None:
        reason = (
            "its database allows no connections"
            if closed
            else f"fleet {fleet!r} no longer lists it: it was dropped, renamed or taken out"
        )
        super().__init__(
            f"{member!r} was forwarded before, and is missing: {reason}. Its pending messages are "
            f"not forwarded; if it is gone for good, run `saf fleet forget {shlex.quote(member)}`"
        )
        self.fleet = fleet
        self.member = member


class DialogError(UsageError):
    """A dialog is at fault, or the request to it."""


class NoSuchService(DialogError):
    """The service that is to begin a dialog does not live at this broker."""

    def __init__(self, service: str, database: str) -> None:
        super().__init__(
            f"service {service!r} does not live in database {database!r}, so nobody would get the "
            f"replies: create it with `saf service create {service}`"
        )
        self.service = service


class NoSuchContract(DialogError):
    """The contract is not known at this broker."""

    def __init__(self, contract: str, version: int | None, database: str) -> None:
        name = f"contract {contract!r}" + (f" version {version}" if version is not None else "")
        super().__init__(
            f"{name} is not known in database {database!r}: create it with "
            f"`saf contract create` or saf.create_contract, the same at both ends"
        )
        self.contract = contract
        self.version = version


class DialogNotFound(DialogError):
    """No conversation has this handle."""

    def __init__(self, handle: UUID, database: str) -> None:
        super().__init__(
            f"database {database!r} has no conversation {handle}: it is closed and forgotten, or "
            "the handle is of another database; see `saf dialog list`"
        )
        self.handle = handle


class DialogElsewhere(DialogError):
    """The handle belongs to a dialog in another database."""

    def __init__(self, handle: UUID, broker: str, database: str) -> None:
        super().__init__(
            f"conversation {handle} lives at broker {broker}, and this connection is to database "
            f"{database!r}: an end of a dialog speaks where it was begun or received"
        )
        self.handle = handle


class DialogFailed(DialogError):
    """The dialog has failed, so no answer will come. ``code`` and ``text`` are the Error's."""

    def __init__(self, handle: UUID, code: int, text: str) -> None:
        super().__init__(f"conversation {handle} has failed ({code}: {text}): end it")
        self.handle = handle
        self.code = code
        self.text = text


class UnexpectedMessage(DialogError):
    """The next message of the dialog has another type than the one waited for."""

    def __init__(self, handle: UUID, wanted: str, found: str | None) -> None:
        super().__init__(
            f"the next message of conversation {handle} has type {found!r}, and not {wanted!r}: "
            "wait for it first, or receive it by saf.receive(…, conversation=…)"
        )
        self.handle = handle
        self.wanted = wanted
        self.found = found


class DialogEnded(DialogError):
    """Nothing more can be sent on the dialog. ``state`` is the state of this end."""

    def __init__(self, handle: UUID, state: str, error: str | None) -> None:
        reason = {
            "disconnected_outbound": "this end has ended it",
            "disconnected_inbound": "the other end has ended it: end it here too",
            "error": f"it has failed ({error}): end it",
            "closed": "it is closed",
        }[state]
        super().__init__(f"nothing can be sent on conversation {handle} any more: {reason}")
        self.handle = handle
        self.state = state


class DialogExpired(DialogError):
    """The lifetime of the dialog is over."""

    def __init__(self, handle: UUID, expired_at: datetime) -> None:
        super().__init__(
            f"the lifetime of conversation {handle} was over at {expired_at.isoformat()}: end it"
        )
        self.handle = handle
        self.expired_at = expired_at


class ContractViolation(DialogError):
    """The contract of a dialog does not allow a message."""


class TypeNotInContract(ContractViolation):
    """The contract has no such message type."""

    def __init__(self, message_type: str | None, contract: str, known: list[str]) -> None:
        super().__init__(
            f"contract {contract} has no message type {message_type!r}, only "
            f"{', '.join(map(repr, known)) or 'none'}"
        )
        self.message_type = message_type


class WrongDirection(ContractViolation):
    """Only the other end sends messages of this type."""

    def __init__(self, message_type: str, contract: str, sent_by: str) -> None:
        super().__init__(
            f"contract {contract}: message type {message_type!r} is sent by the {sent_by} only"
        )
        self.message_type = message_type
        self.sent_by = sent_by


class SchemaViolation(ContractViolation):
    """A body does not match its message type. ``path`` leads to the value at fault."""

    def __init__(self, message_type: str, path: str, problem: str) -> None:
        super().__init__(f"message type {message_type!r}: at {path}: {problem}")
        self.message_type = message_type
        self.path = path


class SchemaError(UsageError):
    """The database is not a broker that this version of saf can use."""


class SchemaMissing(SchemaError):
    """The database has no ``saf`` schema."""

    def __init__(self, database: str) -> None:
        in_django = (
            ". Or, in Django: add 'saf.django' to INSTALLED_APPS, and run `manage.py migrate`"
        )
        super().__init__(
            f"database {database!r} has no saf schema: run `saf migrate --dsn …` on it"
            + in_django * ("django.db" in sys.modules)
        )
        self.database = database


class SchemaMismatch(SchemaError):
    """The ``saf`` schema has a revision that this library does not support."""

    def __init__(self, database: str, found: str, expected: str) -> None:
        older = found < expected
        super().__init__(
            f"database {database!r} has saf schema {found}, this library needs {expected}: "
            + ("run `saf migrate --dsn …` on it" if older else "upgrade the saf-outbox package")
        )
        self.database = database
        self.found = found
        self.expected = expected


class RowsGone(SchemaError):
    """The schema exists, but saf's own rows were truncated or deleted, or were never copied."""

    def __init__(self, database: str, missing: Sequence[str]) -> None:
        super().__init__(
            f"database {database!r}: saf's own rows are gone: {'; '.join(missing[:NAMED])}. "
            f"{REFILL}"
        )
        self.database = database
        self.missing = missing


class Restored(SchemaError):
    """The database was restored, so the transaction ids in its rows are invalid here."""

    def __init__(self, database: str, where: str = "", why: Sequence[str] = ()) -> None:
        reasons = "; ".join(why) or (
            "it was restored into another cluster, or its transaction ids went back: its cursors "
            "no longer show what was read"
        )
        super().__init__(
            (f"{where}: " if where else "")
            + f"database {database!r} cannot be used as it was restored or moved: {reasons}. "
            "Nothing is read, stored or purged. Run `saf rebase` first"
        )
        self.database = database
        self.why = tuple(why)


class StopTimeout(SafError):
    """A worker did not finish in time after a stop request. Nothing is lost."""

    exit_code = 75

    def __init__(self, seconds: float, in_hand: Sequence[str] = ()) -> None:
        work = "; ".join(in_hand) or "the work in hand"
        super().__init__(
            f"stopped, with work in hand that took longer than stop_timeout ({seconds:g} s): "
            f"{work}. It is rolled back and comes again, which counts as an attempt. Make the "
            "handler faster, or raise stop_timeout and the time after which the supervisor kills "
            "the process"
        )
        self.seconds = seconds
        self.in_hand = in_hand


class Unavailable(SafError):
    """A database does not answer. Nothing is lost: the next run continues where this one stopped.

    ``hangs``: the server exists but does not answer in time, e.g. because of a lock, so an
    immediate retry does not help.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: cron and Airflow retry

    def __init__(self, what: str, reason: str, *, hangs: bool = False) -> None:
        super().__init__(
            f"{what} does not answer: {reason}; `saf doctor` shows who holds the lock"
            if hangs
            else f"{what} is unavailable: {reason}"
        )
        self.what = what
        self.reason = reason
        self.hangs = hangs

    def of(self, what: str) -> Unavailable:
        """Return the same error with the configured name of the database."""
        return Unavailable(what, self.reason, hangs=self.hangs)


class DiskFull(Unavailable):
    """A server's disk is full. Nothing is lost: delivery continues when space is free."""

    needs_operator = True

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.args = (
            f"the disk of {what} is full: {reason}. Free or add space there: `saf purge` frees "
            "the space of messages that were read",
        )

    def of(self, what: str) -> DiskFull:
        """Return the same error with the configured name of the database."""
        return DiskFull(what, self.reason)


class Faulty(Unavailable):
    """A destination raised an error outside of its protocol.

    Such an error tells nothing about a message, so no message is to blame.
    """


class Refused(Unavailable):
    """A server rejects this login. Nothing is lost, but an operator has to fix it."""

    exit_code = 2
    needs_operator = True

    def __init__(self, what: str, reason: str, cure: str) -> None:
        super().__init__(what, reason)
        self.args = (f"{what} refuses the login: {reason}. {cure[0].upper()}{cure[1:]}",)
        self.cure = cure

    def of(self, what: str) -> Refused:
        """Return the same error with the configured name of the database."""
        return Refused(what, self.reason, self.cure)


class Unexpected(SafError):
    """An unknown failure. It concerns one broker only, and the others continue."""

    def __init__(self, what: str, error: BaseException) -> None:
        text = " ".join(str(error).split()) or "no more is known"
        super().__init__(
            f"{what}: {type(error).__name__}: {text}. Nothing was marked or lost; others continue"
        )
        self.what = what


class PurgedMeanwhile(SafError):
    """A purge has emptied a slot since a read was planned. No partial result is returned."""

    exit_code = 75

    def __init__(self, what: str, log: str, slots: Sequence[int]) -> None:
        super().__init__(
            f"{what}: messages of the {log} were purged after this read was planned (slot "
            f"{ranges(slots)}), so it would give fewer than its snapshot shows: load() it again"
        )
        self.what = what
        self.slots = slots


class JobFailed(SafError):
    """A Spark job failed. Its batches stay open; the next cycle, or run, continues with them."""

    exit_code = 75

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the Spark job failed: {reason}. Nothing is lost: its batches stay open and are "
            "forwarded by the next cycle or run"
        )
        self.reason = reason


class SparkGone(SafError):
    """Spark ended before the work was done. The next run continues where this one stopped."""

    exit_code = 75

    def __init__(self, reason: str, *, stopping: bool = False) -> None:
        advice = (
            "the forwarder was told to stop, and the signal may have ended Spark's JVM as well: "
            "send it to the forwarder's process alone"
            if stopping
            else "was its JVM killed, for want of memory perhaps?"
        )
        super().__init__(
            f"Spark has ended: {reason}. Nothing is lost: start the forwarder again; {advice}"
        )
        self.reason = reason


class UnknownService(SafError):
    """A destination does not have an addressed service. Nothing was stored.

    ``known`` has the services that it has, and ``broker`` its name in saf.toml, if they are known.
    """

    exit_code = 75
    needs_operator = True

    def __init__(
        self,
        destination: str,
        services: Sequence[str],
        *,
        known: Iterable[str] = (),
        broker: str | None = None,
    ) -> None:
        super().__init__(
            f"{no_service(destination, services, known=known, broker=broker)}; its messages wait "
            "until then"
        )
        self.destination = destination
        self.services = services
        self.known = known
        self.broker = broker

    def of(self, service: str) -> UnknownService:
        """Return the error for one of the services."""
        return UnknownService(self.destination, [service], known=self.known, broker=self.broker)


def no_service(
    where: str, services: Sequence[str], *, known: Iterable[str] = (), broker: str | None = None
) -> str:
    """Say that a place lacks services, which ones may be meant, and how to create them.

    >>> print(no_service("ledger", ["biling"], known=["billing"], broker="ledger"))
    ledger has no service 'biling'. Did you mean 'billing'? Create it: `saf service create biling \
--broker ledger`
    >>> print(no_service("destination 'web'", ["a", "b"]))
    destination 'web' has no services 'a', 'b'. Create them there: `saf service create a b`
    """
    named = services[:NAMED]
    more = len(services) - NAMED
    others = {*known} - {*services}
    at = ("--broker", broker) if broker is not None else ()
    return (
        f"{where} has no {'service' if len(services) == 1 else 'services'} "
        f"{', '.join(map(repr, named))}{f' and {more} more' if more > 0 else ''}. "
        + meant(named, others)
        + f"Create {'it' if len(services) == 1 else 'them'}{'' if at else ' there'}: "
        f"`{shlex.join(('saf', 'service', 'create', *named, *at))}`"
    )


def meant(names: Iterable[str], known: Iterable[str]) -> str:
    """Ask for similar known names, in a sentence and a space; return nothing if there are none.

    >>> meant(["biling"], ["billing", "shipping"]), meant(["erp"], ["billing"])
    ("Did you mean 'billing'? ", '')
    """
    others = sorted(known)
    near = [repr(match) for name in names for match in difflib.get_close_matches(name, others, n=1)]
    return f"Did you mean {' and '.join(dict.fromkeys(near))}? " if near else ""


class AnotherBroker(SafError):
    """Messages are addressed to another broker than this destination. Nothing was stored."""

    exit_code = 75
    needs_operator = True

    def __init__(self, destination: str, broker: str, others: Sequence[str]) -> None:
        super().__init__(
            f"{destination} is broker {broker}, and refuses messages for {', '.join(others)}: "
            "add that broker to saf.toml as a destination; they wait until then"
        )
        self.broker = broker
        self.others = others


class Paused(SafError):
    """An operator has paused a destination. Its messages wait until it is resumed."""

    exit_code = 75
    needs_operator = True

    def __init__(self, destination: str, pause: str) -> None:
        super().__init__(
            f"destination {destination!r} is {pause}; its messages wait until "
            f"`saf destination resume {shlex.quote(destination)}`"
        )
        self.destination = destination


class NoDialogs(SafError):
    """A destination takes no messages of dialogs, because no other end could live there."""

    exit_code = 75
    needs_operator = True

    def __init__(self, destination: str, services: Sequence[str]) -> None:
        super().__init__(
            f"{destination} takes no messages of dialogs, because no answer could ever come from "
            f"there: route {', '.join(map(repr, services[:NAMED]))} to a broker; they wait until "
            "then"
        )
        self.destination = destination
        self.services = services


class Unroutable(SafError):
    """No route leads from a message's service, and its broker if set, to a destination.

    ``elsewhere`` has the destinations that routes lead to, each with its actual broker; ``routed``
    the services that have a route.
    """

    exit_code = 75
    needs_operator = True

    def __init__(
        self,
        service: str,
        broker: str | None = None,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
        routed: Iterable[str] = (),
    ) -> None:
        known = "".join(f", destination {name!r} is {one}" for name, one in elsewhere.items())
        if broker is None:
            problem = (
                f"no route for service {service!r}. {meant([service], routed)}Add one: "
                f"`{shlex.join(('saf', 'route', 'add', 'DESTINATION', '--service', service))}`, or "
                "set forwarder.default_destination in saf.toml"
            )
        else:
            problem = (
                f"no destination is known to be broker {broker}, which messages for service "
                f"{service!r} are addressed to{known}: add that broker to saf.toml as a destination"
            )
        super().__init__(f"{problem}; its messages wait until then")
        self.service = service
        self.broker = broker
        self.elsewhere = elsewhere


class Rejected(SafError):
    """A destination answers, but does not accept these messages."""

    def __init__(self, destination: str, reason: str) -> None:
        super().__init__(f"{destination} rejects messages: {reason}")
        self.destination = destination
        self.reason = reason


class UnreadableBody(SafError, ValueError):
    """A received body does not match its content type."""

    def __init__(self, message_id: UUID, content_type: str | None, problem: str) -> None:
        super().__init__(
            f"the body of message {message_id} cannot be read, its content type is "
            f"{content_type or 'not given'}: {problem}"
        )
        self.message_id = message_id


class UnreadableHeaders(SafError, ValueError):
    """Python cannot parse the received headers: JSON too deep, or a number too long."""

    def __init__(self, message_id: UUID, problem: str) -> None:
        super().__init__(f"the headers of message {message_id} cannot be read: {problem}")
        self.message_id = message_id


class UndecodableEvent(SafError, ValueError):
    """A received body does not match its event's class: no further attempt helps.

    ``path`` leads to the value at fault, e.g. ``body.lines[2].price``.
    """

    def __init__(self, message_id: UUID, event: str, version: int, path: str, problem: str) -> None:
        super().__init__(
            f"message {message_id} is not event {event!r}, as version {version}: {path}: {problem}"
        )
        self.message_id = message_id
        self.event = event
        self.version = version
        self.path = path
        self.problem = problem


class NewerEvent(SafError):
    """A received body has a newer version than the event here. A newer receiver can read it."""

    def __init__(self, message_id: UUID, event: str, version: int, known: int) -> None:
        super().__init__(
            f"message {message_id} is event {event!r} version {version}, newer than version "
            f"{known} here: deploy receivers before senders"
        )
        self.message_id = message_id
        self.event = event
        self.version = version
        self.known = known


class NotCorrelated(SafError):
    """A message fits no process of its saga: no further attempt helps.

    Without a function of `saf.Saga.missing` that handles it, the message is a dead letter.
    """

    def __init__(self, saga: str, message_type: str | None, key: str | None, why: str) -> None:
        super().__init__(
            f"message type {message_type!r}, key {key!r}, fits no process of saga {saga!r}: {why}"
        )
        self.saga = saga
        self.message_type = message_type
        self.key = key
        self.why = why


class UnreadableState(SafError, ValueError):
    """The state of a saga's process does not match its class: no further attempt helps.

    ``path`` leads to the value at fault, e.g. ``state.lines[2].price``.
    """

    def __init__(self, process: str, version: int, path: str, problem: str) -> None:
        super().__init__(
            f"the state of {process} cannot be read, as version {version}: {path}: {problem}"
        )
        self.process = process
        self.version = version
        self.path = path
        self.problem = problem


class NotVerified(SafError):
    """A webhook has no valid signature of the expected sender, or is too old."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the webhook is not accepted: {why}")
        self.why = why


class Ahead(SafError):
    """A destination has stored messages that its source does not know about."""

    exit_code = 2
    needs_operator = True

    def __init__(
        self, where: str, shards: Sequence[int], marks: Mapping[Any, Any] | None = None
    ) -> None:
        claim = "has stored more of" if marks else "knows of more that was set aside of"
        super().__init__(
            f"{where} {claim} {in_words(shards)} than the source knows: the source seems to be "
            "restored from a backup. Nothing was written; run `saf rebase`"
        )
        self.where = where
        self.shards = shards
        self.marks = marks or {}


class Behind(SafError):
    """A destination no longer has messages that it has acknowledged."""

    exit_code = 2
    needs_operator = True

    def __init__(
        self,
        where: str,
        shards: Sequence[int],
        since: datetime | None = None,
        lower: object = None,
    ) -> None:
        last = f"since a batch of {since.isoformat()}" if since else "or never had any"
        example = f", for example: {lower}" if lower else ""
        super().__init__(
            f"{where} has lost messages that it acknowledged of {in_words(shards)}, "
            f"{last}{example}. It seems to be restored from a backup. Nothing was written. "
            "`saf reconcile` names the missing messages, and `saf rebase` sends them again"
        )
        self.where = where
        self.shards = shards
        self.since = since
        self.lower = lower


class SourceRefused(SafError):
    """A source must not be read on as it is, so nothing of it is read until an operator decides."""

    exit_code = 2
    needs_operator = True

    def __init__(self, name: str, problem: str, way_out: str) -> None:
        where = shlex.quote(name)
        super().__init__(
            f"source {name!r}: {problem}. Nothing is read: {way_out}, then run `saf source "
            f"continue {where} --from earliest`, or `--from latest` to skip what the topic has now"
        )
        self.name = name


class SourceSetBack(SourceRefused):
    """A topic ends before messages that were read: it was restored, or a failover lost some."""

    def __init__(
        self, name: str, topic: str, shard: int, mark: tuple[int, int], last: tuple[int, int]
    ) -> None:
        super().__init__(
            name,
            f"topic {topic!r} was set back: shard {shard} was read up to {placed(mark)}, and ends "
            f"at {placed(last)}",
            "find out what its broker has lost",
        )
        self.shard = shard


class TopicMadeAgain(SourceRefused):
    """A topic was deleted, and maybe made again."""

    def __init__(self, name: str, topic: str, how: str) -> None:
        super().__init__(
            name, f"topic {topic!r} was deleted or made again: {how}", "make sure that it is right"
        )


class RetentionPassed(SourceRefused):
    """A topic has lost messages before they were read, because it keeps them for too short."""

    def __init__(self, name: str, topic: str, shard: int, messages: int) -> None:
        super().__init__(
            name,
            f"topic {topic!r} no longer has {messages:,} messages of shard {shard} that were not "
            "read yet: they were deleted, or its retention is too short",
            "let the topic keep messages for longer",
        )
        self.shard = shard
        self.messages = messages


class SourceChanged(SourceRefused):
    """The settings name another topic than the one that was read under this name."""

    def __init__(self, name: str, before: str, now: str) -> None:
        super().__init__(
            name,
            f"it read {before} before, and saf.toml names {now} now",
            "give the new topic a table [sources.NAME] of its own, or if this one replaces it",
        )


def placed(position: tuple[int, int]) -> str:
    """Return a position as its broker writes it.

    >>> placed((0, 7)), placed((1760000000000, 7))
    ('7', '1760000000000-7')
    """
    first, second = position
    return f"{first}-{second}" if first else str(second)


class StagedLost(SafError):
    """Some messages that a Spark job has staged are gone, so nothing was sent."""

    exit_code = 75

    def __init__(self, what: str, staged: int, left: int) -> None:
        super().__init__(
            f"{what}: of {staged:,} messages that tasks have staged, {left:,} are left, because "
            "the server crashed or the job took longer than a day. Nothing was sent: run it again"
        )
        self.what = what
        self.staged = staged
        self.left = left


class NotThisStream(UsageError):
    """A stream's subscription and its checkpoint do not belong together."""


class StreamSetBack(SafError):
    """A database has less than it had when a stream's checkpoint was written."""

    exit_code = 2

    def __init__(self, what: str, name: str, how: str) -> None:
        super().__init__(
            f"{what} {how}: the stream {name!r} cannot continue from its checkpoint, because the "
            "database was restored or set back, and messages would be skipped. Run `saf doctor`, "
            "and `saf rebase` if it says so; then begin with a new checkpointLocation, where "
            "messages that were read since the backup may come again"
        )
        self.what = what
        self.name = name


class StreamTakenOver(SafError):
    """A newer query uses the same subscription, so this query may not commit any more."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(
            f"{what}: another query has begun to read with the subscription {name!r}, so this one "
            "ends: stop one of the queries, or give it another subscription"
        )
        self.what = what
        self.name = name


class Fenced(SafError):
    """Another owner has taken over the shards, so nothing more may be written for them."""

    def __init__(self, where: str, shards: list[int]) -> None:
        super().__init__(
            f"fenced at {where}: there is a newer owner or batch of "
            f"{in_words(shards) if shards else 'its shards'}; nothing was written"
        )
        self.where = where
        self.shards = shards


def masked(text: str) -> str:
    """Return an error's text without message data that a library has quoted.

    All code that logs, prints or stores an error calls this function; saf's own errors call it in
    ``__str__``.

    >>> masked("DETAIL:  Failing row contains (1, billing, secret).")
    'DETAIL:  Failing row contains (••••••).'
    >>> masked("Key (card)=(4711) already exists.")
    'Key (card)=(••••••) already exists.'
    >>> masked("[type=int_parsing, input_value='secret', input_type=str]")
    '[type=int_parsing, input_value=••••••, input_type=str]'
    """
    for quoted in QUOTED:
        text = quoted.sub(rf"\g<1>{HIDDEN}\g<2>", text)
    return text


def in_words(shards: Iterable[int]) -> str:
    """Return shards in words for humans.

    >>> in_words([5]), in_words(range(64))
    ('shard 5', 'shards 0-63')
    """
    words = ranges(sorted(shards))
    return f"shard {words}" if words.isdecimal() else f"shards {words}"


def ranges(numbers: Iterable[int]) -> str:
    """Return rising numbers as short ranges.

    >>> ranges([0, 1, 2, 3, 7, 9, 10]), ranges([])
    ('0-3, 7, 9-10', '')
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)
