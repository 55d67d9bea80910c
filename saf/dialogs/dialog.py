"""Dialogs: sending and ending on the application's end of a conversation, in its transaction.

    dialog = saf.begin_dialog(conn, from_service="shop", to_service="warehouse", contract="order")
    dialog.send(conn, {"order": 7}, message_type="order")
    dialog.end(conn)

``conn`` is as for `saf.Outbox.send`, and the transaction stays the caller's.

An end is a row of saf.conversation. Sending is one statement: it increases ``send_sequence`` under
the row's lock, and inserts a message into the outbox, which travels like any other, with the
conversation's id as its key. The other end takes each number once, and in order
(`saf.dialogs.arrival`). An Error is the exception: it is taken as soon as it arrives, and earlier
messages that have not been received by then never will be.

An end also puts messages to itself into its own inbox, for later: the Error at the end of its
lifetime, and the timer. These have no number.

A large body travels in fragments: it is cut into consecutive messages of its conversation. Every
fragment except the last is marked as a fragment. The last fragment *is* the message: its id,
headers and type are those of the whole, and the whole is received with it. The last fragment states
the number of fragments and bytes, so the length of a file need not be known before reading it.

Each fragment has its own number, and both ends count it like any other message. So the guarantees
for messages (in order, once; messages ahead wait; a restart loses nothing) hold for fragments.
Either all fragments of a body are sent, or none.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard
from uuid import UUID, uuid4

from saf.database import the_row
from saf.dialogs.contracts import RESERVED, Contract
from saf.dialogs.statements import (
    BEGIN,
    END,
    END_HERE,
    END_WITH_ERROR,
    ERROR,
    FAIL,
    FAIL_SET_BACK,
    FIELDS,
    OPEN,
    SAY_SIGNED,
    SEND,
    START_TIMER,
    STOP_TIMER,
    TELL_ONESELF,
    TIMER,
    WHAT_IS_KNOWN,
    WHY_NOT,
    Code,
    Saying,
    State,
)
from saf.errors import (
    DialogElsewhere,
    DialogEnded,
    DialogError,
    DialogExpired,
    DialogNotFound,
    InvalidMessage,
    NoSuchContract,
    NoSuchService,
)
from saf.message import (
    DEFAULT_MAX_BYTES,
    FRAGMENT,
    ORIGIN,
    RESERVED_HEADER,
    STRICT,
    WHOLE,
    Message,
    Row,
    as_json,
    encode,
)
from saf.setaside.isolation import said
from saf.transaction import Transaction, enter
from saf.typed.event import event_of

if TYPE_CHECKING:
    from saf import Received
    from saf.signing.signer import Key, RequireSigned, Signer
    from saf.transaction import Conn

FRAGMENT_BYTES = 1024 * 1024
"""Longest body that travels in one piece, in bytes; docs/conversations.md gives the reason."""
LARGEST_BYTES = 2 * 1024 * 1024 * 1024
"""Longest body in fragments, in bytes; the same as in Service Broker."""

LONGEST_SECONDS = 1_000 * 365 * 86_400
"""Longest lifetime and timer, in seconds: a thousand years, to stay within the calendar."""

HIGHEST_CODE = 2**31 - 1
"""Highest error code: the maximum of PostgreSQL's integer."""

SAVEPOINT = "SAVEPOINT saf_fragments"
UNDO = "ROLLBACK TO SAVEPOINT saf_fragments"
RELEASE = "RELEASE SAVEPOINT saf_fragments"


class Readable(Protocol):
    """A binary file, or an object that reads like one."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dialog:
    """One end of a conversation. It holds no connection; `open_dialog` opens it again."""

    handle: UUID
    """Name of this end in its database; the other end has its own handle."""
    conversation_id: UUID
    """Id of the conversation, the same at both ends."""
    is_initiator: bool
    monolog: bool
    service: str
    """Service of this end."""
    far_service: str
    """Service of the other end."""
    contract: Contract | None
    """Version of the contract that the dialog began with; None without a contract."""
    broker_id: UUID
    """Broker of this end."""
    signer: Signer | None = field(default=None, repr=False, compare=False)
    """Signs this end's messages."""

    def send(
        self,
        conn: Conn,
        body: object,
        *,
        message_type: str | None = None,
        headers: Mapping[str, Any] | None = None,
        max_bytes: int = LARGEST_BYTES,
        fragment_bytes: int = FRAGMENT_BYTES,
    ) -> UUID:
        """Send a message to the other end, and return the message's id.

        Args:
            conn: the caller's connection, with the transaction that contains the message.
            body: as for `saf.Outbox.send`; or a binary file, which is read from its current
                position to its end, one fragment at a time.
            message_type: type of the body; see `saf.dialogs.contracts`. An event has its own.
            headers: JSON values by name.
            max_bytes: largest accepted body. A body that the contract checks, and a monolog's, is
                held in memory and limited to `saf.message.DEFAULT_MAX_BYTES` in any case.
            fragment_bytes: size of the pieces in which a dialog's larger body travels, in bytes.

        Raises:
            InvalidMessage: the message cannot be stored. Nothing is written, even if only the end
                of a file shows that it is too large.
            TypeNotInContract, WrongDirection, SchemaViolation: the contract does not allow the
                message; nothing is written.
            DialogEnded: one of the ends has ended, or there was an error.
            DialogExpired: its lifetime is over.
            DialogElsewhere, DialogNotFound: the dialog is in another database.
            AutocommitError, SchemaMissing, SchemaMismatch: as `saf.Outbox.send`.
        """
        if message_type is not None and message_type.startswith(RESERVED):
            raise InvalidMessage("message_type", f"{message_type!r}: {RESERVED}… is for saf's own")
        if any(name.lower().startswith(RESERVED_HEADER) for name in headers or ()):
            raise InvalidMessage("headers", f"{RESERVED_HEADER}… is for saf's own")
        return self.say(
            conn,
            body,
            message_type=message_type,
            headers=headers,
            max_bytes=max_bytes,
            fragment_bytes=fragment_bytes,
        )

    def say(
        self,
        conn: Conn,
        body: object,
        *,
        message_type: str | None,
        headers: Mapping[str, Any] | None,
        max_bytes: int = LARGEST_BYTES,
        fragment_bytes: int = FRAGMENT_BYTES,
        exactly: bool = False,
    ) -> UUID:
        """Send a message like `send`, but also with a type or headers reserved for saf.

        ``exactly``: the headers are complete, and nothing is added that a sender adds.
        """
        if not 1 <= fragment_bytes <= DEFAULT_MAX_BYTES:
            raise InvalidMessage(
                "fragment_bytes", f"{fragment_bytes:,} is not from 1 to {DEFAULT_MAX_BYTES:,}"
            )
        if message_type is None and (event := event_of(type(body))) is not None:
            message_type = event.name
        known = None
        if self.contract is not None:
            known = self.contract.allowed(message_type, from_initiator=self.is_initiator)
        if self.monolog or (known is not None and known.reads):
            max_bytes = min(max_bytes, DEFAULT_MAX_BYTES)
            if is_file(body):
                body = fill(body, max_bytes + 1)
        if is_file(body):
            row = self._encoded(b"", message_type, headers, exactly=exactly)
            return self._say_in_fragments(enter(conn), row, body, fragment_bytes, max_bytes)
        row = self._encoded(body, message_type, headers, max_bytes, exactly=exactly)
        if known is not None:
            known.check(row.body)
        if self.monolog or len(row.body) <= fragment_bytes:
            return self._say(enter(conn), SEND, row)
        file = io.BytesIO(row.body)
        return self._say_in_fragments(enter(conn), row, file, fragment_bytes, max_bytes)

    def end(self, conn: Conn) -> None:
        """End this side in order. The other side may still send; its messages are dropped here.

        Raises:
            DialogEnded: this end has ended already.
            DialogElsewhere, DialogNotFound: the dialog is in another database.
        """
        self.end_as(conn, None)

    def end_as(self, conn: Conn, headers: Mapping[str, Any] | None) -> None:
        """End this side like `end`; ``headers``: exactly those of the End, if it is passed on."""
        row = self._encoded(b"", END, headers, exactly=headers is not None)
        self._say(enter(conn), END_HERE, row)

    def end_with_error(self, conn: Conn, code: int, text: str) -> None:
        """End both sides. The other side gets the error instead of the messages not received yet.

        Args:
            conn: as for `send`.
            code: the application's own error code, from 1 to 2147483647.
            text: a description of the error for the other end.

        Raises:
            DialogEnded: this end has ended already.
            DialogElsewhere, DialogNotFound: the dialog is in another database.
        """
        if not 0 < code <= HIGHEST_CODE:
            raise DialogError(f"error code {code}: an application's are from 1 to {HIGHEST_CODE}")
        self.fail(enter(conn), code, text, ending=True)

    def start_timer(self, conn: Conn, seconds: float) -> None:
        """Request a message of type `TIMER` after ``seconds``, in place of an earlier timer.

        Raises the errors of `end`.
        """
        if not 0 <= seconds <= LONGEST_SECONDS:
            raise DialogError(f"a timer of {seconds} seconds: at most {LONGEST_SECONDS:,}")
        transaction = enter(conn)
        row = self._encoded({}, TIMER)._asdict()
        if not transaction.fetch(START_TIMER, {**row, "handle": self.handle, "seconds": seconds}):
            raise self._why_not(transaction)

    def stop_timer(self, conn: Conn) -> None:
        """Forget the timer, if any."""
        transaction = enter(conn)
        if not transaction.fetch(STOP_TIMER, {"handle": self.handle}):
            raise self._why_not(transaction)

    def wait(
        self,
        engine: Any,
        message_type: str | type | None = None,
        *,
        timeout: float = 60.0,
        keys: Mapping[str, Key] | None = None,
        require_signed: RequireSigned = True,
    ) -> Received | None:
        """Wait for the next message of the other end, and return it; None after ``timeout``.

        The message is received when this returns, so the code after it handles it at most once. To
        handle it exactly once, use `saf.receive` with ``conversation=``. Commit what this end has
        sent before: otherwise the other end does not see it.

        Args:
            engine: where this end is, as for `saf.receive`.
            message_type: the type to wait for, or an event's class; None: any type.
            timeout: longest wait, in seconds.
            keys: take only messages that are signed with one of these keys; as for `saf.receive`.
            require_signed: "origin" requires the signatures of first senders; needs ``keys``.

        Raises:
            DialogFailed: the dialog has failed; the error has its code and text.
            DialogEnded: the other end has ended, or this end has.
            UnexpectedMessage: the next message has another type; it stays the next one.
            DialogNotFound: the dialog is in another database.
            UsageError, Unavailable: as `saf.receive`.
        """
        from saf import _waiting  # receiving knows dialogs, and not the other way round

        return _waiting.wait(
            self, engine, message_type, timeout, keys, require_signed=require_signed
        )

    async def wait_async(
        self,
        engine: Any,
        message_type: str | type | None = None,
        *,
        timeout: float = 60.0,
        keys: Mapping[str, Key] | None = None,
        require_signed: RequireSigned = True,
    ) -> Received | None:
        """Wait like `wait`, under asyncio; ``engine`` is as for `saf.areceive`.

        A cancelled wait has received nothing, or a message whose receipt is rolled back.

        Raises the errors of `wait`.
        """
        from saf import _waiting  # as above

        return await _waiting.wait_async(
            self, engine, message_type, timeout, keys, require_signed=require_signed
        )

    def fail(
        self,
        transaction: Transaction,
        code: int,
        text: str,
        *,
        ending: bool = False,
        again: bool = False,
        here: bool = True,
        original: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        """Report an error to the other end and, unless ``ending``, to this end, by messages.

        Args:
            transaction: the caller's.
            code: the error, for programs.
            text: the error, for humans.
            ending: this end is closed by the error, and needs no message.
            again: report to the other end even if this end has failed or ended before.
            here: report to this end, unless it is ending.
            original: for an error that was passed on, its original form.
            headers: for an error that was passed on with its signature, exactly its headers.
        """
        text = said(text)
        wrapped = {} if original is None else {"original": original}
        body = {"code": int(code), "text": text, **wrapped}
        row = self._encoded(body, ERROR, headers, exactly=headers is not None)
        error = {"code": int(code), "text": text}
        if ending:
            self._say(transaction, END_WITH_ERROR, row, **error)
        elif self._said(transaction, FAIL_SET_BACK if again else FAIL, row, **error) and here:
            # another message, because two logs would otherwise have the same id
            row = row._replace(message_id=uuid4())
            transaction.execute(
                TELL_ONESELF, {**row._asdict(), "handle": self.handle, "seconds": 0}
            )

    def _encoded(
        self,
        body: object,
        message_type: str | None,
        headers: Mapping[str, Any] | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        exactly: bool = False,
    ) -> Row:
        message = Message(
            service=self.far_service, body=body, message_type=message_type, headers=headers
        )
        row = encode(message, max_bytes)
        return row._replace(headers=as_json(headers)) if exactly else row

    def _say(self, transaction: Transaction, saying: Saying, row: Row, **more: object) -> UUID:
        if not self._said(transaction, saying, row, **more):
            raise self._why_not(transaction)
        return row.message_id

    def _said(self, transaction: Transaction, saying: Saying, row: Row, **more: object) -> bool:
        """Send, end or fail; return False if this end cannot do that now."""
        params = {**row._asdict(), "handle": self.handle, **more}
        if self.signer is None:
            return bool(transaction.fetch(saying.at_once, params))
        found = transaction.fetch(saying.change, params)
        if found and found[0][0]:
            transaction.execute(SAY_SIGNED, self._signed(self.signer, row, *found[0][1:]))
        return bool(found)

    def _signed(  # noqa: PLR0917 - the columns of a statement
        self,
        signer: Signer,
        row: Row,
        service: str,
        far_service: str,
        far_broker: str | None,
        conversation_id: str,
        from_initiator: bool | None,
        sequence: int,
        headers: str,
    ) -> dict[str, Any]:
        row = row._replace(
            from_service=service,
            to_service=far_service,
            to_broker=UUID(far_broker) if far_broker else None,
            key=conversation_id,
            headers=as_json(STRICT.decode(row.headers) | json.loads(headers)),
        )
        facts = {
            "conversation_id": conversation_id,
            "from_initiator": from_initiator,
            "sequence": sequence,
        }
        return {**signer.sign(row, **facts)._asdict(), **facts}

    def _say_in_fragments(
        self,
        transaction: Transaction,
        row: Row,
        file: Readable,
        fragment_bytes: int,
        max_bytes: int,
    ) -> UUID:
        """Send a file, all or nothing, because the caller may continue after an error."""
        headers = STRICT.decode(row.headers)
        transaction.execute(SAVEPOINT)
        try:
            hashed = self.signer is not None
            for piece, extra in split(file, fragment_bytes, max_bytes, hashed=hashed):
                message_id, own = row.message_id, headers
                if FRAGMENT in extra:
                    # an origin is one of the whole body
                    message_id = uuid4()
                    own = {name: value for name, value in headers.items() if name != ORIGIN}
                fragment = row._replace(
                    message_id=message_id, headers=as_json(own | extra), body=piece
                )
                self._say(transaction, SEND, fragment)
        except BaseException:
            # if the connection has failed there is nothing to undo, and the caller must see that
            # error
            with suppress(Exception):
                transaction.execute(UNDO)
            raise
        transaction.execute(RELEASE)
        return row.message_id

    def _why_not(self, transaction: Transaction) -> DialogError:
        broker_id, database, state, code, text, expires_at, is_over = _of_broker(
            transaction, WHY_NOT, {"handle": self.handle}
        )
        if broker_id != self.broker_id:
            return DialogElsewhere(self.handle, str(self.broker_id), database)
        if state is None:
            return DialogNotFound(self.handle, database)
        expired = is_over if code is None else code == Code.EXPIRED
        if expired and state not in (State.CLOSED, State.DISCONNECTED_OUTBOUND):
            return DialogExpired(self.handle, expires_at)
        return DialogEnded(self.handle, state, text and f"{code}: {text}")


def begin_dialog(
    conn: Conn,
    *,
    from_service: str,
    to_service: str,
    contract: str | None = None,
    lifetime: float | None = None,
    to_broker: UUID | None = None,
    related: UUID | Dialog | None = None,
    signer: Signer | None = None,
) -> Dialog:
    """Begin a dialog. The first message informs the other end.

    Args:
        conn: the caller's connection, with the transaction in which the dialog begins.
        from_service: the service of this end; it must be in this database, and gets the replies.
        to_service: the service of the other end.
        contract: the contract, in its newest version here. None: any messages may be sent.
        lifetime: seconds after which the dialog is over for both ends, unless both have ended.
        to_broker: the broker of the other end, if several host the service.
        related: a dialog in this database whose group the new one joins; see `saf.dialogs.groups`.
        signer: signs the messages of this `Dialog`; see docs/security.md.

    Raises:
        NoSuchService, NoSuchContract: the service or the contract does not exist in this database.
        DialogNotFound: the related dialog does not exist in this database.
        InvalidMessage: a name is invalid for messages.
        AutocommitError, SchemaMissing, SchemaMismatch: as `saf.Outbox.send`.
    """
    return _begin(
        conn, from_service, to_service, contract=contract, lifetime=lifetime, to_broker=to_broker,
        related=related.handle if isinstance(related, Dialog) else related, signer=signer,
    )  # fmt: skip


def begin_monolog(
    conn: Conn, *, from_service: str, topic: str, signer: Signer | None = None
) -> Dialog:
    """Begin a monolog, whose messages go to all subscribers of the topic, in order.

    A topic is a service whose routes lead to several destinations (see `saf.routing.routes`), each
    with any number of subscriptions. Subscribers do not answer. A monolog ends with its last
    message.

    Raises the errors of `begin_dialog`.
    """
    return _begin(conn, from_service, topic, monolog=True, signer=signer)


def _begin(
    conn: Conn,
    from_service: str,
    to_service: str,
    *,
    contract: str | None = None,
    lifetime: float | None = None,
    to_broker: UUID | None = None,
    related: UUID | None = None,
    monolog: bool = False,
    signer: Signer | None = None,
) -> Dialog:
    # validates the names and the broker
    encode(Message(service=to_service, from_service=from_service, to_broker=to_broker, body=b""))
    if lifetime is not None and not 0 < lifetime <= LONGEST_SECONDS:
        raise DialogError(
            f"a lifetime of {lifetime} seconds: it must be above zero, and at most "
            f"{LONGEST_SECONDS:,}"
        )
    transaction = enter(conn)
    question = {"service": from_service, "contract": contract, "related": related}
    broker_id, database, version, definition, is_local, group_id = _of_broker(
        transaction, WHAT_IS_KNOWN, question
    )
    if not is_local and not monolog:
        raise NoSuchService(from_service, database)
    if contract is not None and version is None:
        raise NoSuchContract(contract, None, database)
    if related is not None and group_id is None:
        raise DialogNotFound(related, database)
    known = Contract.from_row(contract, version, definition) if contract is not None else None
    dialog = Dialog(
        handle=uuid4(), conversation_id=uuid4(), is_initiator=True, monolog=monolog,
        service=from_service, far_service=to_service, contract=known, broker_id=broker_id,
        signer=signer,
    )  # fmt: skip
    transaction.execute(
        BEGIN,
        {
            "handle": dialog.handle,
            "conversation_id": dialog.conversation_id,
            "monolog": monolog,
            "service": from_service,
            "far_service": to_service,
            "far_broker": to_broker,
            "contract": contract,
            "version": version,
            "group_id": group_id or uuid4(),
            "lifetime": lifetime,
        },
    )
    return dialog


def open_dialog(conn: Conn, handle: UUID, *, signer: Signer | None = None) -> Dialog:
    """Open a dialog again by its handle, in any process; ``signer`` signs its messages.

    Raises:
        DialogNotFound: no end in this database has this handle.
    """
    transaction = enter(conn, allow_autocommit=True)
    ((broker_id, database, contract, version, definition, *fields),) = transaction.fetch(
        OPEN, {"handle": handle}
    )
    if fields[0] is None:
        raise DialogNotFound(handle, database)
    known = Contract.from_row(contract, version, definition) if contract is not None else None
    names = FIELDS.split(", ")
    return Dialog(
        contract=known, broker_id=broker_id, signer=signer,
        **dict(zip(names, fields, strict=True)),
    )  # fmt: skip


def _of_broker(transaction: Transaction, query: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the row of a query of saf.broker."""
    found = transaction.fetch(query, params)
    if not found:
        ((database,),) = transaction.fetch("SELECT current_database()")
        return the_row(found, database)
    return found[0]


def is_file(body: object) -> TypeGuard[Readable]:
    """Return whether a body is a file, which must be read."""
    return callable(getattr(body, "read", None))


def split(
    file: Readable, fragment_bytes: int, max_bytes: int = LARGEST_BYTES, *, hashed: bool = False
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Cut a body into fragments; yield each with its headers. Two at a time are in memory.

    ``hashed``: the last fragment has the hash of the whole body, which its signature covers.

    Raises:
        InvalidMessage: the body has more than ``max_bytes``.

    >>> import io
    >>> list(split(io.BytesIO(b"large"), 4))
    [(b'larg', {'saf-fragment': 1}), (b'e', {'saf-whole': {'fragments': 2, 'bytes': 5}})]
    """
    piece, number = fill(file, fragment_bytes), 1
    length, whole = len(piece), hashlib.sha256(piece) if hashed else None
    while length <= max_bytes and (following := fill(file, fragment_bytes)):
        yield piece, {FRAGMENT: number}
        length += len(following)
        if whole is not None:
            whole.update(following)
        piece, number = following, number + 1
    if length > max_bytes:
        raise InvalidMessage("body", f"more bytes than max_bytes ({max_bytes:,})")
    extent: dict[str, Any] = {"fragments": number, "bytes": length}
    if whole is not None:
        extent["sha256"] = whole.hexdigest()
    yield piece, {WHOLE: extent} if number > 1 else {}


def fill(file: Readable, size: int) -> bytes:
    """Read ``size`` bytes, or to the end of the file: a pipe may return fewer at a time.

    Raises:
        InvalidMessage: the file returns text.
    """
    pieces = [file.read(size)]
    if isinstance(pieces[0], str):
        raise InvalidMessage("body", "a text file: open it in binary mode")
    missing = size - len(pieces[0])
    while pieces[-1] and missing > 0:
        pieces.append(file.read(missing))
        missing -= len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else pieces[0][:0].join(pieces)


def count(length: int, fragment_bytes: int) -> int:
    """Return the number of fragments of a body of ``length`` bytes.

    >>> count(0, 40_960), count(40_960, 40_960), count(40_961, 40_960), count(2**31, 40_960)
    (1, 1, 2, 52429)
    """
    return max(1, -(-length // fragment_bytes))
