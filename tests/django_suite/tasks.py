"""Django's tasks by saf: enqueued in the transaction, run exactly once, tried again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from saf.django import tasks
from saf.django.models import DeadLetter, InboxMessage, OutboxMessage
from saf.errors import UsageError
from saf.outbox import Outbox
from saf.testing import Clock
from shop.models import Order
from work import attempts, later, no_task, ran, write

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@pytest.fixture
def finished() -> Iterator[list[Any]]:
    """Results of tasks that have finished, and whether the database was in a transaction then."""
    found: list[Any] = []

    def note(task_result: Any, **_: object) -> None:
        found.append((task_result, connection.in_atomic_block))

    signal: Any = tasks.__dict__["task_finished"]  # Django's, or that of django_tasks
    signal.connect(note)
    yield found
    signal.disconnect(note)


def run() -> int:
    return tasks.worker().drain()


def test_a_task_exists_if_and_only_if_its_transaction_commits() -> None:
    with pytest.raises(KeyError), transaction.atomic():
        write.enqueue("A-1")
        raise KeyError
    assert run() == 0
    with transaction.atomic():
        write.enqueue("A-2", total=90)
    assert run() == 1
    assert Order.objects.get().total == 90
    assert run() == 0
    assert ran == ["A-2"]


def test_outside_of_a_block_a_task_is_enqueued_immediately() -> None:
    result = write.enqueue("A-1")
    assert str(InboxMessage.objects.get().message_id) == result.id
    assert (result.status, result.args, result.kwargs) == ("READY", ["A-1"], {})
    assert result.enqueued_at is not None
    assert run() == 1


def test_no_forwarder_is_needed() -> None:
    write.enqueue("A-1")
    assert OutboxMessage.objects.count() == 0
    assert InboxMessage.objects.get().to_service == "tasks.default"


def test_a_result_is_told_after_the_commit(finished: list[Any]) -> None:
    result = write.enqueue("A-1", total=3)
    run()
    ((done, in_transaction),) = finished
    assert not in_transaction
    assert (done.id, done.status, done.return_value) == (result.id, "SUCCESSFUL", {"total": 3})
    assert (done.attempts, done.args) == (1, ["A-1"])


def test_a_task_that_raises_is_undone_tried_again_and_then_a_dead_letter(
    finished: list[Any], saf_clock: Clock
) -> None:
    write.enqueue("A-1", total=-1)
    for _ in range(5):
        assert not finished
        run()
        saf_clock.move(minutes=10)
    assert Order.objects.count() == 0
    assert ran == ["A-1"] * 5
    letter = DeadLetter.objects.get()
    assert "a negative total" in letter.error
    ((failed, _),) = finished
    assert failed.status == "FAILED"
    assert failed.errors[0].exception_class is ValueError
    assert "a negative total" in failed.errors[0].traceback


def test_a_task_knows_its_attempt(saf_clock: Clock) -> None:
    attempts.enqueue()
    for _ in range(3):
        run()
        saf_clock.move(minutes=10)
    assert ran == [(1, "RUNNING"), (2, "RUNNING"), (3, "RUNNING")]
    assert DeadLetter.objects.count() == 0


def test_a_task_waits_for_its_time(saf_clock: Clock) -> None:
    write.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("A-1")
    assert run() == 0
    saf_clock.move(hours=1, seconds=1)
    assert run() == 1


def test_an_async_task_writes_in_the_same_transaction() -> None:
    later.enqueue("A-1")
    assert run() == 1
    assert Order.objects.get().total == 7


def test_only_tasks_are_called() -> None:
    for path in ("work.no_task", "os.getcwd", "work.nothing", "nowhere.at_all"):
        body: dict[str, Any] = {"task": path, "args": [], "kwargs": {}}
        outbox = Outbox(allow_autocommit=True)
        outbox.send(connection, "tasks.default", body, message_type=tasks.MESSAGE_TYPE)
    assert no_task.__name__ == "no_task"
    assert run() == 0
    assert ran == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"priority": 5}, "priority"), ({"queue_name": "mail"}, "mail")],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        write.using(**changes)


def test_a_result_cannot_be_asked_for_and_says_so() -> None:
    assert not tasks.Backend.supports_get_result
    with pytest.raises(NotImplementedError):
        write.get_result("x")


def test_arguments_that_have_no_json_form_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError):
        write.enqueue(object())
    assert InboxMessage.objects.count() == 0


def test_an_unknown_queue_or_backend_is_named() -> None:
    with pytest.raises(UsageError, match="no queue 'mail', only 'default'"):
        tasks.worker(queue="mail")
    with pytest.raises(UsageError, match=r"TASKS\['other'\] is not"):
        tasks.worker("other")


def test_wrong_settings_are_found_by_the_checks() -> None:
    params = {"QUEUES": [], "OPTIONS": {"database": "nowhere", "colour": "red"}}
    found = tasks.Backend("default", params).check()
    assert {one.id for one in found} == {"saf.E002", "saf.E003", "saf.E004"}
    assert tasks.Backend("default", {}).check() == []
