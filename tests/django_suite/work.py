"""Handlers and tasks that fail, register functions for the commit, or are async."""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError, connection, transaction

import saf
from saf.django.tasks import task
from shop.models import Invoice, Order

worker = saf.Worker(connection, "billing", policy=saf.Policy(permanent=(LookupError,)))
after_commit: list[str] = []
ran: list[object] = []


@worker.handler("OrderPlaced")
def placed(message: saf.Received, given: Any) -> None:
    assert given.in_atomic_block
    order = message.json()
    transaction.on_commit(lambda: after_commit.append(order["order"]))
    Invoice.objects.create(order=order["order"], total=order["total"])
    if order["total"] < 0:
        raise ValueError("a negative total")
    if order["total"] == 0:
        raise LookupError("a total of nothing")


@worker.handler("Swallowed")
def swallowed(message: saf.Received, _: object) -> None:
    """Hide an error after which Django would roll everything back."""
    try:
        with transaction.atomic(savepoint=False):
            Invoice.objects.create(order=message.key, total=1)
            raise KeyError(message.key)  # noqa: TRY301 - hidden on purpose
    except KeyError:
        pass


@worker.handler("Nested")
def nested(message: saf.Received, _: object) -> None:
    """Go on after an error of the database, as Django's users do."""
    Invoice.objects.create(order=message.key, total=1)
    try:
        with transaction.atomic():
            Invoice.objects.create(order=message.key, total=2)
    except IntegrityError:
        Invoice.objects.filter(order=message.key).update(total=3)


@task
def write(number: str, *, total: int = 1) -> dict[str, int]:
    Order.objects.create(number=number, total=total)
    ran.append(number)
    if total < 0:
        raise ValueError("a negative total")
    return {"total": total}


@task(takes_context=True)
def attempts(context: Any) -> None:
    ran.append((context.attempt, context.task_result.status))
    if context.attempt < 3:
        raise ValueError("not yet")


@task
async def later(number: str) -> None:
    await Order.objects.acreate(number=number, total=7)


def no_task() -> None:
    ran.append("no task")
