"""Decorators of `import saf`: each works with and without parentheses, and refuses other things."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import saf
from saf.errors import UsageError

DSN = "dbname=shop"


def decorators() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Everything of `saf` that may stand above a function: it returns what takes a function."""
    for name in saf.__all__:
        thing = getattr(saf, name)
        found = {name: thing}
        if inspect.isclass(thing):
            found = {
                f"{name}.{method}": function
                for method, function in inspect.getmembers(thing, inspect.isfunction)
                if not method.startswith("_")
            }
        for label, function in found.items():
            forms = [*typing.get_overloads(function), function] if callable(function) else []
            if any(
                "Callable[[H]" in str(getattr(f, "__annotations__", {}).get("return"))
                for f in forms
            ):
                yield label, function


def described(message: saf.Received, connection: Any) -> None: ...


def test_these_are_all_decorators() -> None:
    assert dict(decorators()).keys() == {
        *("Worker.handler", "Worker.batch_handler", "handles"),
        *("Saga.starts", "Saga.handler", "Saga.batch_handler", "Saga.on_error", "Saga.on_end"),
        *("Saga.timer", "Saga.missing"),
    }


@pytest.mark.parametrize("method", ["handler", "batch_handler"])
@pytest.mark.parametrize("form", ["bare", "empty", "None"])
def test_a_handler_without_a_type_is_for_all_types_however_it_is_written(
    method: str, form: str
) -> None:
    worker = saf.Worker(DSN, "billing")
    decorator = getattr(worker, method)
    arguments = {"empty": (), "None": (None,)}
    decorate = decorator if form == "bare" else decorator(*arguments[form])

    assert decorate(described) is described
    assert worker.handled_types() == [None]
    with pytest.raises(UsageError, match="any type has a handler already: described"):
        decorator(described)


def test_a_method_without_a_type_is_for_all_types_however_it_is_written() -> None:
    class Bare(saf.Processor):
        @saf.handles
        def any(self, message: saf.Received, connection: Any) -> None: ...

    class Empty(saf.Processor):
        @saf.handles()
        def any(self, message: saf.Received, connection: Any) -> None: ...

    for processor in (Bare, Empty):
        assert processor.handlers == {None: processor.any}
        assert saf.Processors(DSN, "billing", processor).handled_types() == [None]


@dataclass
class Order:
    """State of a process."""


def takes(*_: object) -> None: ...


@pytest.mark.parametrize("method", ["on_error", "on_end", "timer", "missing"])
@pytest.mark.parametrize("form", ["bare", "empty", "None"])
def test_a_handler_of_a_saga_is_for_all_services_however_it_is_written(
    method: str, form: str
) -> None:
    decorator = getattr(saf.Saga(DSN, "orders", state=Order), method)
    arguments = {"empty": (), "None": (None,)}
    decorate = decorator if form == "bare" else decorator(*arguments[form])

    assert decorate(takes) is takes
    with pytest.raises(UsageError, match=r"has a handler for \w+ already"):
        decorator(takes)


@pytest.mark.parametrize("method", ["starts", "handler"])
def test_a_handler_of_a_saga_for_messages_names_their_type(method: str) -> None:
    decorator = getattr(saf.Saga(DSN, "orders", state=Order), method)
    for given in (takes, None):
        with pytest.raises(UsageError, match="a handler's message type is text"):
            decorator(given)


@pytest.mark.parametrize("given", [7, ["OrderPlaced"], b"OrderPlaced"])
def test_what_a_saga_cannot_take_is_refused_by_its_value(given: Any) -> None:
    saga = saf.Saga(DSN, "orders", state=Order)
    for method in ("starts", "handler", "on_error", "on_end", "timer", "missing"):
        with pytest.raises(UsageError) as error:
            getattr(saga, method)(given)
        assert repr(given) in str(error.value)


@pytest.mark.parametrize("given", [7, ["OrderPlaced"], b"OrderPlaced"])
def test_what_is_neither_a_type_nor_a_function_is_refused_by_its_value(given: Any) -> None:
    worker = saf.Worker(DSN, "billing")
    for decorator in (worker.handler, worker.batch_handler, saf.handles):
        with pytest.raises(UsageError) as error:
            decorator(given)
        assert repr(given) in str(error.value)
    assert worker.handled_types() == []


def test_a_function_without_parentheses_is_checked_as_any_other() -> None:
    worker = saf.Worker(DSN, "billing")
    with pytest.raises(UsageError, match=r"expected \(message, connection\)"):
        worker.handler(lambda: None)
