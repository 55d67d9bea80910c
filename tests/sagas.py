"""A shop for tests of sagas: orders, stock and payment, in one database; programs may be killed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.failpoints import fail_point
from saf.receiving.retries import Policy
from saf.routing.routes import add_route
from tests.pipeline import connect

ORDERS, STOCK, PAYMENT = "orders", "stock", "payment"
SERVICES = (ORDERS, STOCK, PAYMENT)
QUICKLY = Policy(max_attempts=1000, first_wait_seconds=0.01, longest_wait_seconds=0.05)

TABLES = """
CREATE TABLE account (customer text PRIMARY KEY, balance int NOT NULL CHECK (balance >= 0));
CREATE TABLE article (name text PRIMARY KEY, amount int NOT NULL CHECK (amount >= 0));
CREATE TABLE payment (dialog uuid PRIMARY KEY, number text UNIQUE, customer text, total int);
CREATE TABLE reservation (dialog uuid PRIMARY KEY, number text UNIQUE, article text, amount int);
CREATE TABLE outcome (number text PRIMARY KEY, result text NOT NULL)
"""
TAKE_STOCK = """
UPDATE article SET amount = amount - %(amount)s WHERE name = %(article)s AND amount >= %(amount)s
"""
RESERVE = "INSERT INTO reservation VALUES (%(dialog)s, %(number)s, %(article)s, %(amount)s)"
RELEASE = """
WITH gone AS (DELETE FROM reservation WHERE dialog = %s RETURNING *)
UPDATE article a SET amount = a.amount + gone.amount FROM gone WHERE name = article
"""
TAKE_MONEY = """
UPDATE account SET balance = balance - %(total)s
WHERE customer = %(customer)s AND balance >= %(total)s
"""
PAY = "INSERT INTO payment VALUES (%(dialog)s, %(number)s, %(customer)s, %(total)s)"
REFUND = """
WITH gone AS (DELETE FROM payment WHERE dialog = %s RETURNING *)
UPDATE account a SET balance = a.balance + total FROM gone WHERE a.customer = gone.customer
"""
CONCLUDE = "INSERT INTO outcome VALUES (%s, %s)"

STEPS = {
    ORDERS: ("placed", "reserved", "paid", "done", "failed", "late"),
    STOCK: ("stock_taken", "stock_refused", "stock_released", "stock_ended"),
    PAYMENT: ("money_taken", "money_refused", "money_returned", "money_ended"),
}
"""Fail points of each service: in its handlers, after their work."""
SILENT = "silent"
"""A customer whose payment is made and never confirmed."""
LATE_SECONDS = 1.0

Connection = psycopg.Connection[Any]


@dataclass
class Order:
    """State of the process of an order."""

    number: str = ""
    reserved: bool = False
    paid: bool = False


def prepare(dsn: Dsn, *, money: int = 1_000, amount: int = 1_000) -> None:
    """The services with local routes, two customers, an article, and one that is sold out."""
    with connect(dsn) as connection:
        for service in SERVICES:
            create_service(connection, service)
            add_route(connection, "here", service=service, local=True)
        connection.execute(TABLES)
        connection.execute(
            "INSERT INTO account VALUES ('rich', %s), ('silent', %s), ('poor', 0)", [money, money]
        )
        connection.execute("INSERT INTO article VALUES ('book', %s), ('rare', 0)", [amount])


def place(dsn: Dsn, number: str, **changes: Any) -> None:
    """Send an order."""
    order = {"number": number, "article": "book", "amount": 1, "customer": "rich", "total": 10}
    with dsn.connect(role="test") as connection:
        saf.Outbox().send(
            connection, ORDERS, order | changes, key=number, message_type="PlaceOrder"
        )


def orders(dsn: Dsn, **options: Any) -> saf.Saga[Order]:
    """The saga, which asks for stock and payment at the same time."""
    saga = saf.Saga(dsn, ORDERS, state=Order, **options)

    def conclude(process: saf.Process[Order], result: str) -> None:
        process.connection.execute(CONCLUDE, [process.key, result])

    def proceed(process: saf.Process[Order]) -> None:
        if process.state.reserved and process.state.paid:
            conclude(process, "done")
            process.end()
            fail_point("done")

    @saga.starts("PlaceOrder")
    def placed(process: saf.Process[Order], message: saf.Received) -> None:
        order = message.json()
        process.state.number = order["number"]
        process.send(STOCK, order, message_type="Reserve")
        process.send(PAYMENT, order, message_type="Pay")
        process.start_timer(LATE_SECONDS if order["customer"] == SILENT else 600)
        fail_point("placed")

    @saga.handler("Reserved")
    def reserved(process: saf.Process[Order], _: saf.Received) -> None:
        process.state.reserved = True
        proceed(process)
        fail_point("reserved")

    @saga.handler("Paid")
    def paid(process: saf.Process[Order], _: saf.Received) -> None:
        process.state.paid = True
        proceed(process)
        fail_point("paid")

    @saga.on_error
    def failed(process: saf.Process[Order], error: saf.DialogFailed) -> None:
        conclude(process, error.text)
        process.fail(error.code, error.text)
        fail_point("failed")

    @saga.timer
    def late(process: saf.Process[Order]) -> None:
        conclude(process, "late")
        process.fail(13, "late")
        fail_point("late")

    return saga


def stock(dsn: Dsn, **options: Any) -> saf.Worker:
    """The service that reserves, and releases what an Error of the order undoes."""
    worker = saf.Worker(dsn, STOCK, **options)

    @worker.handler("Reserve")
    def reserve(message: saf.Received, connection: Connection) -> None:
        assert message.dialog is not None
        order = message.json() | {"dialog": message.dialog.handle}
        if not connection.execute(TAKE_STOCK, order).rowcount:
            message.dialog.end_with_error(connection, 11, "sold out")
            fail_point("stock_refused")
            return
        connection.execute(RESERVE, order)
        message.dialog.send(connection, {}, message_type="Reserved")
        fail_point("stock_taken")

    @worker.handler("saf/error")
    def release(message: saf.Received, connection: Connection) -> None:
        assert message.dialog is not None
        connection.execute(RELEASE, [message.dialog.handle])
        message.dialog.end(connection)
        fail_point("stock_released")

    @worker.handler("saf/end-dialog")
    def end(message: saf.Received, connection: Connection) -> None:
        assert message.dialog is not None
        message.dialog.end(connection)
        fail_point("stock_ended")

    return worker


def payment(dsn: Dsn, **options: Any) -> saf.Worker:
    """The service that takes money, and returns what an Error of the order undoes."""
    worker = saf.Worker(dsn, PAYMENT, **options)

    @worker.handler("Pay")
    def pay(message: saf.Received, connection: Connection) -> None:
        assert message.dialog is not None
        order = message.json() | {"dialog": message.dialog.handle}
        if not connection.execute(TAKE_MONEY, order).rowcount:
            message.dialog.end_with_error(connection, 12, "no money")
            fail_point("money_refused")
            return
        connection.execute(PAY, order)
        if order["customer"] != SILENT:
            message.dialog.send(connection, {}, message_type="Paid")
        fail_point("money_taken")

    @worker.handler("saf/error")
    def refund(message: saf.Received, connection: Connection) -> None:
        assert message.dialog is not None
        connection.execute(REFUND, [message.dialog.handle])
        message.dialog.end(connection)
        fail_point("money_returned")

    @worker.handler("saf/end-dialog")
    def end(message: saf.Received, connection: Connection) -> None:
        assert message.dialog is not None
        message.dialog.end(connection)
        fail_point("money_ended")

    return worker


WORKERS: dict[str, Any] = {ORDERS: orders, STOCK: stock, PAYMENT: payment}


def program(dsn: Dsn, service: str) -> None:
    """For tests.processes: handle what is due, a little at a time."""
    WORKERS[service](dsn, max_messages=5, policy=QUICKLY).drain()


def drain(dsn: Dsn, **options: Any) -> None:
    """Let all three work in this process until nothing is due."""
    workers = [make(dsn, **options) for make in WORKERS.values()]
    while sum(worker.drain() for worker in workers):
        pass


def rows(dsn: Dsn, statement: str) -> list[Any]:
    with connect(dsn) as connection:
        return fetch(connection, statement)


def outcomes(dsn: Dsn) -> dict[str, str]:
    return dict(rows(dsn, "SELECT number, result FROM outcome"))


def kept(dsn: Dsn, statement: str) -> set[str]:
    return {number for (number,) in rows(dsn, statement)}


def check(dsn: Dsn, expected: dict[str, str]) -> None:
    """Each order has its one outcome, and money and stock are where the outcomes say."""
    assert outcomes(dsn) == expected
    done = {number for number, result in expected.items() if result == "done"}
    assert kept(dsn, "SELECT number FROM payment") == done
    assert kept(dsn, "SELECT number FROM reservation") == done
    assert rows(dsn, "SELECT DISTINCT state FROM saf.conversation") == [("closed",)]
