"""Sagas: processes that talk with several services, and undo what was done when one of them fails.

    saga = saf.Saga(dsn, "orders", state=Order)

    @saga.starts("PlaceOrder")
    def place(process, message):
        process.state = Order(article=message.json()["article"])
        process.send("stock", {"article": process.state.article}, message_type="Reserve")

    @saga.handler("Reserved")
    def reserved(process, message):
        process.state.reserved = True
        process.end()

A `Saga` is a `saf.Worker` whose handlers get a `Process` in place of the connection. The state of a
process, the messages that its handler sends, the rows that it writes and the receipt of its message
are one transaction.

*A process is a conversation group.* Its dialogs are in the group, the state is the group's, and one
receiver at a time has the group in hand (`saf.dialogs.groups`). A process that a dialog's message
starts has the group of that dialog. A process that a message without a dialog starts has a group
that is named by the service and the message's key: other messages with this key find it.

*The process's own end.* Each process has a dialog that sends nothing. It holds the process's timer,
keeps the group while the process has no other dialog, and ends with the process. The group is
remembered as long as a closed dialog, so a late message finds that its process has ended.

*Failure.* If another service ends its dialog with an error, the process fails by default: it ends
all its dialogs with this error, and each of those services undoes its part. saf reports a message
that cannot be handled as such an error, too.

*A message without a process* is a dead letter: the error says whether no process has its key, the
process has ended, or it runs already. If the message belongs to a dialog, both ends get an Error.
A dialog's message is dropped and counted, as always, if the process has ended the dialog before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload
from uuid import UUID, uuid4, uuid5

from saf.dialogs.arrival import end_too
from saf.dialogs.contracts import RESERVED
from saf.dialogs.dialog import HIGHEST_CODE, Dialog, begin_dialog, open_dialog
from saf.dialogs.facts import Facts
from saf.dialogs.statements import BEGIN, END, ERROR, TIMER
from saf.errors import (
    DialogError,
    DialogFailed,
    NewerEvent,
    NotCorrelated,
    UndecodableEvent,
    UnreadableState,
    UsageError,
)
from saf.received import Received
from saf.receiving.delivery import Delivery
from saf.receiving.handlers import check_handler, checked_type, is_function, named
from saf.receiving.retries import Policy
from saf.receiving.savepoints import Savepoints
from saf.receiving.worker import Worker
from saf.setaside.dropped import Reason
from saf.telemetry.logger import Log
from saf.transaction import Rows, enter
from saf.typed.event import VERSION, Event, event_of, the_event

if TYPE_CHECKING:
    from saf.receiving.link import Engine

S = TypeVar("S")
H = TypeVar("H", bound=Callable[..., object])

NAMES = UUID("6b3d7f0e-4c1a-5e0b-9a57-5af05a6a0001")
"""Namespace of the groups that are named by a service and a key."""

log = Log("saf.saga")

# Both lock the group as a receiver does, and create no second process for a key
FIND = """
SELECT CAST(group_id AS text), CAST(state AS text) FROM saf.conversation_group
WHERE group_id = coalesce(
    (SELECT group_id FROM saf.conversation WHERE handle = CAST(%(handle)s AS uuid)),
    CAST(%(group_id)s AS uuid))
FOR NO KEY UPDATE
"""
FIND_OR_CREATE = """
INSERT INTO saf.conversation_group AS g (group_id) VALUES (CAST(%(group_id)s AS uuid))
ON CONFLICT (group_id) DO UPDATE SET state = g.state
RETURNING CAST(group_id AS text), CAST(state AS text)
"""
SAVE = """
UPDATE saf.conversation_group SET state = CAST(%(state)s AS jsonb)
WHERE group_id = CAST(%(group_id)s AS uuid)
"""
OPEN_ENDS = """
SELECT CAST(handle AS text), ended_there OR error_code IS NOT NULL FROM saf.conversation
WHERE group_id = CAST(%(group_id)s AS uuid) AND service = CAST(%(service)s AS text)
  AND NOT ended_here
ORDER BY handle
"""
END_WITH = """
SELECT CAST(handle AS text) FROM saf.conversation
WHERE group_id = CAST(%(group_id)s AS uuid) AND service = CAST(%(service)s AS text)
  AND far_service = CAST(%(far_service)s AS text) AND handle <> CAST(%(own)s AS uuid)
ORDER BY ended_here, created_at DESC, handle LIMIT 1
"""
IS_OPEN = """
SELECT state FROM saf.conversation WHERE handle = CAST(%(handle)s AS uuid) AND NOT ended_here
"""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A stored state, in the form of a message, which `saf.typed.event` decodes."""

    message_id: UUID
    message_type: str
    body: bytes
    headers: Mapping[str, Any]

    def may_say(self, header: str) -> bool:
        """Return whether there is a header."""
        return header in self.headers


class Process(Generic[S]):
    """A process of a `Saga`, as its handlers get it.

    The methods work in the transaction of the message, and raise the errors of `saf.Dialog`.
    """

    def __init__(  # noqa: PLR0917 - called in one place
        self,
        saga: Saga[S],
        form: Event[S],
        connection: Any,
        message: Received,
        group_id: str,
        stored: str | None,
    ) -> None:
        self.connection = connection
        """Connection of the transaction, for the application's own statements."""
        self.message = message
        """The message to handle."""
        self.is_new = stored is None
        """True if this message starts the process."""
        self._saga = saga
        self._form = form
        self._group_id = group_id
        self._stored = None if stored is None else json.loads(stored)
        self._known: dict[str, Any]
        if self._stored is None:
            self._known = {"saga": saga.subscription, "key": message.lane, "own": str(uuid4())}
        elif isinstance(self._stored, dict) and "saga" in self._stored:
            self._known = {**self._stored}
        else:
            raise UsageError(f"the state of group {group_id} was not stored by a saf.Saga")
        self.key: str = self._known["key"]
        """Key of the message that started the process."""
        self._state: S | None = self._initial() if self.is_new else self._decoded()

    @property
    def state(self) -> S:
        """The state. Change it, or set another one: it is stored when the handler returns."""
        if self._state is None:
            raise UsageError(f"{self} has no state yet: the handler that starts it sets it")
        return self._state

    @state.setter
    def state(self, state: S) -> None:
        self._state = state

    @property
    def has_ended(self) -> bool:
        """True after `end` and `fail`."""
        return "ended" in self._known

    @property
    def is_running(self) -> bool:
        """True if the process was started by an earlier message, and has not ended."""
        return not self.is_new and not self.has_ended

    def dialog(self, service: str) -> Dialog | None:
        """Return the process's dialog with a service; None if none was begun.

        If there are several, this is the newest that has not ended here. A router that redirects
        gives a dialog another service: keep the handle of such a dialog in the state.
        """
        found = self._fetch(END_WITH, far_service=service, own=self._known["own"])
        return self._opened(found[0][0]) if found else None

    def begin_dialog(self, service: str, **options: Any) -> Dialog:
        """Begin a dialog of this process with a service.

        Args:
            service: the service of the other end.
            options: ``contract``, ``lifetime`` and ``to_broker``, as for `saf.begin_dialog`.
        """
        self._must_run()
        return begin_dialog(
            self.connection, from_service=self._saga.subscription, to_service=service,
            related=UUID(self._known["own"]), signer=self._saga.signer, **options,
        )  # fmt: skip

    def send(self, service: str, body: object, **options: Any) -> UUID:
        """Send a message on the process's dialog with a service; begin the dialog if missing.

        After the end of that dialog, this raises `DialogEnded`: begin another one.
        A service that has started the process by a dialog gets its answers in the same way.

        Args:
            service: the service of the other end.
            body: as for `saf.Dialog.send`.
            options: ``message_type``, ``headers`` and others, as for `saf.Dialog.send`.
        """
        self._must_run()
        dialog = self.dialog(service) or self.begin_dialog(service)
        return dialog.send(self.connection, body, **options)

    def start_timer(self, seconds: float) -> None:
        """Call the saga's timer handler after ``seconds``, in place of an earlier timer."""
        self._must_run()
        if TIMER not in self._saga.handled_types():
            raise UsageError(f"{self}: nothing handles the timer; write @saga.timer")
        self._opened(self._known["own"]).start_timer(self.connection, seconds)

    def stop_timer(self) -> None:
        """Forget the timer, if any."""
        self._opened(self._known["own"]).stop_timer(self.connection)

    def end(self) -> None:
        """End the process, and its dialogs in order: what the other services did is final."""
        self._must_run()
        for handle, _ in self._fetch(OPEN_ENDS):
            self._opened(handle).end(self.connection)
        self._known["ended"] = {}

    def fail(self, code: int, text: str) -> None:
        """End the process, and its dialogs with an error: the other services undo their parts.

        Args:
            code: a code of the application, from 1 to 2147483647, or that of a `saf.DialogFailed`.
            text: a description of the error for the other services.
        """
        if not -HIGHEST_CODE <= code <= HIGHEST_CODE or code == 0:
            raise DialogError(f"error code {code}: an application's are from 1 to {HIGHEST_CODE}")
        self._must_run()
        for handle, is_over in self._fetch(OPEN_ENDS):
            dialog = self._opened(handle)
            if is_over:
                dialog.end(self.connection)
            else:
                dialog.fail(enter(self.connection), code, text, ending=True)
        self._known["ended"] = {"code": code, "text": text}
        log.warning(
            "process_failed", saga=self._saga.subscription, key=self.key, code=code, detail=text
        )

    def _begin(self) -> None:
        """Begin the process's own end."""
        service = self._saga.subscription
        enter(self.connection).execute(
            BEGIN,
            {
                **dict.fromkeys(("far_broker", "contract", "version", "lifetime")),
                **{"handle": self._known["own"], "conversation_id": uuid4(), "monolog": False},
                **{"service": service, "far_service": service, "group_id": self._group_id},
            },
        )

    def _initial(self) -> S | None:
        """Return the state of a new process; None if its class needs values."""
        try:
            return self._form.model()
        except (TypeError, ValueError):
            return None

    def _decoded(self) -> S:
        """Return the stored state; raise an `UnreadableState` if it does not match its class."""
        stored = Stored(
            message_id=UUID(self._group_id),
            message_type=self._form.name,
            body=json.dumps(self._known.get("state")).encode(),
            headers={VERSION: self._known.get("version", 1)},
        )
        try:
            return self._form.decode(stored)
        except UndecodableEvent as error:
            path = error.path.replace("body", "state", 1)
            raise UnreadableState(str(self), error.version, path, error.problem) from None
        except NewerEvent as error:
            raise UsageError(
                f"the state of {self} has version {error.version}, newer than version "
                f"{error.known} here: update this worker"
            ) from None

    def _save(self) -> None:
        """Store the state, if it has changed, once it is sure that it can be read again."""
        state = self._form.adapter.dump_json(
            self.state, by_alias=True, round_trip=True, warnings=False
        )
        self._known |= {"version": self._form.version, "state": json.loads(state)}
        if self._known != self._stored:
            self._decoded()
            params = {"state": json.dumps(self._known), "group_id": self._group_id}
            enter(self.connection).execute(SAVE, params)

    def _is_own(self, dialog: Dialog) -> bool:
        """Return whether a dialog is the process's own end."""
        return dialog.handle == UUID(self._known["own"])

    def _opened(self, handle: str) -> Dialog:
        return open_dialog(self.connection, UUID(handle), signer=self._saga.signer)

    def _fetch(self, statement: str, **params: Any) -> Rows:
        known = {"group_id": self._group_id, "service": self._saga.subscription}
        return enter(self.connection).fetch(statement, {**known, **params})

    def _must_run(self) -> None:
        if self.has_ended:
            raise UsageError(f"{self} has ended: it neither sends nor ends again")

    def __str__(self) -> str:
        return f"process {self.key!r} of saga {self._saga.subscription!r}"


class Saga(Worker, Generic[S]):
    """Handle the messages of a service, each for the process that it belongs to.

    Args:
        engine: as for `saf.Worker`.
        service: the service; its processes live in this database.
        state: class of a process's state: a dataclass or a pydantic model. If it is a `saf.event`,
            older states pass its upcasters.
        policy: how to treat messages whose handling fails. A message that fits no process, or
            whose process has an unreadable state, is a dead letter after its first attempt.
        options: further options of `saf.Worker`; handlers are not async.

    Raises:
        UsageError: the class of the state is neither of them, or an option is invalid.
    """

    def __init__(
        self,
        engine: Engine,
        service: str,
        *,
        state: type[S],
        policy: Policy | None = None,
        **options: Any,
    ) -> None:
        policy = policy or Policy()
        permanent = (*policy.permanent, NotCorrelated, UnreadableState)
        super().__init__(engine, service, policy=replace(policy, permanent=permanent), **options)
        if not (is_dataclass(state) or hasattr(state, "__pydantic_fields__")):
            raise UsageError(
                f"saga {service!r}: its state {named(state)} is neither a dataclass nor a pydantic "
                "model"
            )
        self._form: Event[S] = event_of(state) or Event(
            model=state, name=state.__qualname__, version=1, key=None
        )
        self._form.adapter  # noqa: B018 - raises now, not at the first message
        self._calls: dict[tuple[str, str | None], Callable[..., object]] = {}
        """Functions by role, and by message type or service."""
        self._current = threading.local()
        self._takes: dict[str, tuple[str | None, Callable[..., object]]] = {
            "error": (ERROR, self._take_error),
            "end": (END, self._take_end),
            "timer": (TIMER, self._take_timer),
            "missing": (None, self._take_message),
        }
        """Message types of roles that are for saf's own messages, and what takes these."""
        self._handlers.add(*self._takes["error"], batch=False)

    @property
    def message_types(self) -> tuple[str, ...]:
        """Message types that have a handler of their own."""
        return tuple(name for name in super().message_types if not name.startswith(RESERVED))

    def starts(self, message_type: str | type) -> Callable[[H], H]:
        """Register a function of (process, message) for messages that start a process.

        It sets `Process.state`, unless each field has a default. For an event's class, it is a
        function of (process, event). If the process runs already, the function of `handler` for
        this type is called instead; without one, the message is a dead letter.

        Raises:
            UsageError: the type has such a function already, or the function has the wrong form.
        """
        return partial(self._of_type, "starts", checked_type(message_type))

    def handler(self, message_type: str | type) -> Callable[[H], H]:  # type: ignore[override]
        """Register a function of (process, message) for messages to a running process.

        For an event's class, it is a function of (process, event).

        Raises:
            UsageError: the type has such a function already, or the function has the wrong form.
        """
        return partial(self._of_type, "handler", checked_type(message_type))

    @overload
    def on_error(self, service: str | None = None) -> Callable[[H], H]: ...
    @overload
    def on_error(self, service: H) -> H: ...
    def on_error(self, service: Any = None) -> Any:
        """Register a function of (process, error) for the Error of a service; None: of any other.

        The error is a `saf.DialogFailed` with its code and text; the dialog is closed. Without such
        a function, the process fails with the same code and text.
        """
        return self._of_service("error", service, "process", "error")

    @overload
    def on_end(self, service: str | None = None) -> Callable[[H], H]: ...
    @overload
    def on_end(self, service: H) -> H: ...
    def on_end(self, service: Any = None) -> Any:
        """Register a function of (process) for the End of a service's dialog; None: of any other.

        This side of the dialog ends, too, with and without such a function.
        """
        return self._of_service("end", service, "process")

    @overload
    def timer(self, call: None = None) -> Callable[[H], H]: ...
    @overload
    def timer(self, call: H) -> H: ...
    def timer(self, call: Any = None) -> Any:
        """Register a function of (process) for the timer; see `Process.start_timer`."""
        return self._of_service("timer", call, "process", by_name=False)

    @overload
    def missing(self, call: None = None) -> Callable[[H], H]: ...
    @overload
    def missing(self, call: H) -> H: ...
    def missing(self, call: Any = None) -> Any:
        """Register a function of (message, connection, error) for messages that fit no process.

        The error is a `saf.NotCorrelated`. If the function returns, the message is handled; if it
        raises the error, the message is a dead letter, as it is without such a function.
        """
        return self._of_service("missing", call, "message", "connection", "error", by_name=False)

    def _register(self, given: Any, *, batch: bool) -> Any:
        del given, batch
        raise UsageError("each message of a saga belongs to a process: use @saga.handler(…)")

    def _of_type(self, role: str, given: str | type, call: H) -> H:
        name, decode = given, None
        if isinstance(given, type):
            event: Event[Any] = the_event(given)
            event.adapter  # noqa: B018 - raises now, not at the first message
            name, decode = event.name, event.decode
        self._add(role, str(name), call, "process", "event" if decode else "message", decode=decode)
        return call

    def _of_service(self, role: str, given: Any, *arguments: str, by_name: bool = True) -> Any:
        if is_function(given):
            return self._add(role, None, given, *arguments)
        if given is not None and not (by_name and isinstance(given, str)):
            what = "a service's name" if by_name else "a function"
            raise UsageError(f"saga {self.subscription!r}: {given!r:.200} is not {what}")
        return lambda call: self._add(role, given, call, *arguments)

    def _add(
        self,
        role: str,
        name: str | None,
        call: H,
        *arguments: str,
        decode: Callable[[Received], Any] | None = None,
    ) -> H:
        what = role if name is None else f"{role} {name!r}"
        check_handler(call, what, *arguments)
        if (role, name) in self._calls:
            raise UsageError(f"saga {self.subscription!r} has a handler for {what} already")
        self._calls[role, name] = (
            call if decode is None else lambda process, message: call(process, decode(message))
        )
        message_type, take = self._takes.get(role, (name, self._take_message))
        if message_type is not None and message_type not in self._handlers:
            self._handlers.add(message_type, take, batch=False)
        return call

    def _check(self) -> None:
        if not any(role == "starts" for role, _ in self._calls):
            raise UsageError(
                f"nothing starts a process of saga {self.subscription!r}: write @saga.starts(…)"
            )
        super()._check()

    def _handle(self, delivery: Delivery[Any], work: Savepoints) -> None:
        self._current.delivery = delivery
        super()._handle(delivery, work)

    def _take_message(self, message: Received, connection: Any) -> None:
        """Handle a message of the application."""
        starts = self._calls.get(("starts", message.message_type))
        handler = self._calls.get(("handler", message.message_type))
        process = self._process(message, connection, creates=starts is not None)
        if process is None or (process.is_new and starts is None):
            self._no_process(message, connection, "no process has its key, or its dialog")
        elif process.is_new and starts is not None:
            process._begin()
            starts(process, message)
            process._save()
        elif process.has_ended:
            self._late(message, connection)
        elif handler is None:
            self._no_process(message, connection, f"process {process.key!r} runs already")
        else:
            handler(process, message)
            process._save()

    def _take_error(self, message: Received, connection: Any) -> None:
        """Handle the Error of a dialog."""
        process, dialog = self._closed(message, connection)
        if process is None or dialog is None:
            return
        facts = Facts().with_error(message.body)
        code, text = facts.error_code or 0, facts.error_text or ""
        handler = self._call_for("error", dialog)
        if handler is None or process._is_own(dialog):
            process.fail(code, text)
        else:
            handler(process, DialogFailed(dialog.handle, code, text))
        process._save()

    def _take_end(self, message: Received, connection: Any) -> None:
        """Handle the End of a dialog."""
        process, dialog = self._closed(message, connection)
        if process is not None and dialog is not None and (call := self._call_for("end", dialog)):
            call(process)
            process._save()

    def _take_timer(self, message: Received, connection: Any) -> None:
        """Handle the timer of a process."""
        process = self._process(message, connection)
        if process is not None and process.is_running:
            self._calls["timer", None](process)
            process._save()

    def _closed(
        self, message: Received, connection: Any
    ) -> tuple[Process[S] | None, Dialog | None]:
        """End a dialog whose other end is over; return its process, if it runs, and the dialog."""
        if message.dialog is not None:
            end_too(message.dialog, connection)
        process = self._process(message, connection)
        return (process if process is not None and process.is_running else None), message.dialog

    def _call_for(self, role: str, dialog: Dialog) -> Callable[..., object] | None:
        return self._calls.get((role, dialog.far_service)) or self._calls.get((role, None))

    def _process(
        self, message: Received, connection: Any, *, creates: bool = False
    ) -> Process[S] | None:
        """Return the process of a message, locked until the transaction ends."""
        dialog = message.dialog
        group_id = None if dialog else uuid5(NAMES, f"{self.subscription}\0{message.lane}")
        found = enter(connection).fetch(
            FIND_OR_CREATE if creates and dialog is None else FIND,
            {"group_id": group_id, "handle": dialog and dialog.handle},
        )
        return Process(self, self._form, connection, message, *found[0]) if found else None

    def _late(self, message: Received, connection: Any) -> None:
        """Drop a message whose process has ended its dialog in this delivery, as arrival would."""
        dialog = message.dialog
        if dialog and not enter(connection).fetch(IS_OPEN, {"handle": dialog.handle}):
            self._current.delivery.drop(message, Reason.ENDED)
        else:
            self._no_process(message, connection, "its process has ended")

    def _no_process(self, message: Received, connection: Any, why: str) -> None:
        error = NotCorrelated(self.subscription, message.message_type, message.key, why)
        if ("missing", None) not in self._calls:
            raise error
        self._calls["missing", None](message, connection, error)
