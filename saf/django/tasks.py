"""A backend for Django's tasks: a task is a message, sent in the transaction that enqueues it.

    TASKS = {"default": {"BACKEND": "saf.django.tasks.Backend", "QUEUES": ["default", "mail"]}}

    with transaction.atomic():
        order.save()
        send_invoice.enqueue(order.pk)      # exists if and only if the order does

    manage.py saf_tasks --queue mail        # runs the tasks

``enqueue`` sends by the outbox; outside ``atomic()``, the task is enqueued immediately. A queue is
the service ``tasks.QUEUE`` of the database. ``manage.py migrate`` creates the service and its local
route, so that the sender's transaction stores the message in the inbox: no forwarder is needed.

A task runs in the transaction in which its message is handled, so its writes to this database by
the ORM happen exactly once. All its other effects happen at least once. A task that
raises is undone and tried again later, up to 5 times (`saf.Policy`); then its message is a dead
letter. ``task_finished`` is sent once the transaction has committed or the last attempt has failed.

The backend supports ``run_after`` and async tasks. It supports neither priorities nor getting
results: saf keeps no return values. Give urgent tasks a queue with a worker of its own.

Django has ``django.tasks`` since 6.0. For Django 5.2, the package django-tasks has the same API,
and this module uses it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import datetime
from traceback import format_exception
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from saf.broker.services import create_service, services
from saf.errors import UsageError
from saf.outbox import Outbox
from saf.received import Received
from saf.receiving.retries import Policy
from saf.receiving.worker import Worker
from saf.routing.routes import add_route
from saf.transaction import below_django

TASKS_EXIST = True
"""False if neither Django's tasks nor the package django-tasks is installed."""

if TYPE_CHECKING:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, task, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskError
    from django.tasks.signals import task_enqueued, task_finished, task_started
else:
    try:
        from django.tasks import TaskContext, TaskResult, TaskResultStatus, task, task_backends
        from django.tasks.backends.base import BaseTaskBackend
        from django.tasks.base import Task, TaskError
        from django.tasks.signals import task_enqueued, task_finished, task_started
    except ModuleNotFoundError:
        try:
            from django_tasks import TaskContext, TaskResult, TaskResultStatus, task, task_backends
            from django_tasks.backends.base import BaseTaskBackend
            from django_tasks.base import Task, TaskError
            from django_tasks.signals import task_enqueued, task_finished, task_started
        except ModuleNotFoundError:
            TASKS_EXIST = False
            BaseTaskBackend = object

__all__ = ["Backend", "prepare", "service", "task", "worker"]

P = ParamSpec("P")
R = TypeVar("R")

MESSAGE_TYPE = "django.task"
ROUTE = "here"
"""Destination in the local route of each queue; see `saf.routing.local`."""


def service(queue: str) -> str:
    """Return the service that a queue is.

    >>> service("default")
    'tasks.default'
    """
    return f"tasks.{queue}"


class Backend(BaseTaskBackend):
    """Enqueues tasks as messages of a database.

    ``OPTIONS`` may have ``database``, the alias of the database; its default is "default".
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = False
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        if not TASKS_EXIST:
            raise ImproperlyConfigured(
                f"TASKS[{alias!r}]: Django has tasks since 6.0; for earlier versions, "
                "pip install django-tasks"
            )
        super().__init__(alias, params)
        self.database: str = self.options.get("database", DEFAULT_DB_ALIAS)
        self._outbox = Outbox(allow_autocommit=True)

    def enqueue(self, task: Task[P, R], args: Any, kwargs: Any) -> TaskResult[P, R]:
        """Send a task as a message in the current transaction; the result's id is the message's."""
        self.validate_task(task)
        result = _result(task, TaskResultStatus.READY, args=list(args), kwargs=dict(kwargs))
        message_id = self._outbox.send(
            connections[self.database],
            service(task.queue_name),
            {"task": task.module_path, "args": result.args, "kwargs": result.kwargs},
            message_type=MESSAGE_TYPE,
            deliver_at=_aware(task.run_after),
        )
        _set(result, id=str(message_id), enqueued_at=timezone.now())
        task_enqueued.send(type(self), task_result=result)
        return result

    def check(self, **_: Any) -> list[checks.CheckMessage]:
        """Report errors in the setting."""
        where = f"TASKS[{self.alias!r}]"
        found: list[checks.CheckMessage] = []
        for name in set(self.options) - {"database"}:
            text = f"{where}['OPTIONS'][{name!r}]: the only option is 'database'"
            found.append(checks.Error(text, id="saf.E002"))
        if self.database not in connections:
            text = f"{where}['OPTIONS']['database']: DATABASES has no {self.database!r}"
            found.append(checks.Error(text, id="saf.E003"))
        if not self.queues:
            text = f"{where}['QUEUES']: name each queue, because each is a service of saf"
            found.append(checks.Error(text, id="saf.E004"))
        return found


def backends() -> Iterator[Backend]:
    """Return the backends of the setting TASKS that are saf's."""
    return (one for one in task_backends.all() if isinstance(one, Backend))


def prepare(using: str) -> None:
    """Create the services and local routes of a database's queues, unless they exist.

    Raises:
        UsageError: the inbox has messages for other services, or older messages for these; see
            `saf.create_services`.
    """
    wanted = {service(q) for one in backends() if one.database == using for q in one.queues}
    if not wanted:
        return
    raw = below_django(connections[using])
    for name in sorted(wanted - {one.name for one in services(raw)}):
        with raw.transaction():
            create_service(raw, name)
            add_route(raw, ROUTE, service=name, local=True)


def worker(
    alias: str = "default",
    queue: str | None = None,
    *,
    threads: int = 1,
    policy: Policy | None = None,
) -> Worker:
    """Return a worker that runs the tasks of a queue.

    Args:
        alias: the backend in the setting TASKS.
        queue: one of its queues. Default: its only one, or else "default".
        threads: number of tasks that run at the same time.
        policy: how to treat tasks that raise.

    Raises:
        UsageError: the backend is not saf's, or it has no such queue.
    """
    known = {one.alias: one for one in backends()}
    backend = known.get(alias)
    if backend is None:
        names = ", ".join(map(repr, sorted(known))) or "none"
        raise UsageError(f"TASKS[{alias!r}] is not a saf.django.tasks.Backend, only {names}")
    if queue is None:
        queue = next(iter(backend.queues)) if len(backend.queues) == 1 else "default"
    if queue not in backend.queues:
        names = ", ".join(map(repr, sorted(backend.queues)))
        raise UsageError(f"TASKS[{alias!r}] has no queue {queue!r}, only {names}")
    runs = Worker(
        connections[backend.database],
        service(queue),
        threads=threads,
        policy=policy,
        max_messages=10,
    )
    runs.handler(MESSAGE_TYPE)(_Runner(backend, queue, runs.policy))
    return runs


class _Runner:
    """Runs a message's task: the handler of a worker."""

    def __init__(self, backend: Backend, queue: str, policy: Policy) -> None:
        self._backend = backend
        self._queue = queue
        self._policy = policy
        self._worker_id = f"{socket.gethostname()}-{os.getpid()}"[:64]

    def __call__(self, message: Received, connection: object) -> None:
        del connection  # the task uses Django's, which is the same
        sender = type(self._backend)
        known = message.json()
        task = self._task(known["task"])
        result = _result(task, TaskResultStatus.RUNNING, args=known["args"], kwargs=known["kwargs"])
        now = timezone.now()
        _set(
            result,
            id=str(message.message_id),
            enqueued_at=_as_django(message.created_at),
            started_at=now,
            last_attempted_at=now,
        )
        result.worker_ids.extend([self._worker_id] * message.attempt)
        task_started.send(sender, task_result=result)
        context: Sequence[Any] = [TaskContext(task_result=result)] if task.takes_context else []
        try:
            returned = task.call(*context, *result.args, **result.kwargs)
        except Exception as error:
            if self._policy.gives_up(message.attempt, error):
                path = f"{type(error).__module__}.{type(error).__qualname__}"
                trace = "".join(format_exception(error))
                result.errors.append(TaskError(exception_class_path=path, traceback=trace))
                _set(result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
                task_finished.send(sender, task_result=result)
            raise
        _set(
            result,
            status=TaskResultStatus.SUCCESSFUL,
            finished_at=timezone.now(),
            _return_value=returned,
        )
        transaction.on_commit(
            lambda: task_finished.send(sender, task_result=result), using=self._backend.database
        )

    def _task(self, path: str) -> Task[..., Any]:
        """Return the task of that path, as this backend's.

        Raises:
            UsageError: this code has no such task.
        """
        try:
            found = import_string(path)
        except ImportError as error:
            raise UsageError(f"no task {path!r} in this code: {error}") from error
        if not isinstance(found, Task):
            # the path is from a message: nothing else may be called
            raise UsageError(f"{path!r} is not a task, but a {type(found).__qualname__}")
        return found.using(backend=self._backend.alias, queue_name=self._queue)


def _result(
    task: Task[P, R], status: TaskResultStatus, *, args: list[Any], kwargs: dict[str, Any]
) -> TaskResult[P, R]:
    """Return a result without id and times; arguments that have no JSON form raise TypeError."""
    return TaskResult(
        task=task,
        id="",
        status=status,
        enqueued_at=None,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=args,
        kwargs=kwargs,
        backend=task.backend,
        errors=[],
        worker_ids=[],
    )


def _set(result: TaskResult[..., Any], **fields: object) -> None:
    """Set fields of a result, which is frozen for everyone but backends."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)


def _aware(moment: datetime | None) -> datetime | None:
    """Return a moment with a time zone; without USE_TZ, Django's moments have none."""
    if moment is None or timezone.is_aware(moment):
        return moment
    return timezone.make_aware(moment)


def _as_django(moment: datetime) -> datetime:
    """Return a moment as Django has it: without USE_TZ, without a time zone."""
    from django.conf import settings

    return moment if settings.USE_TZ else timezone.make_naive(moment)
