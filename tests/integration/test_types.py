"""The types of `saf.Outbox` and of typed messages, as mypy checks them in an application."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run

EVENTS = """
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import saf

outbox = saf.Outbox(from_service="shop")


@saf.event("OrderPlaced", key="number")
@dataclass(frozen=True)
class OrderPlaced:
    number: str
    total: int


ORDER = OrderPlaced(number="A-1", total=1)
"""
RIGHT = """

def place(session: Session, raw: psycopg.Connection[Any]) -> list[saf.Sent]:
    sent = outbox.send(session, "billing", ORDER, key=ORDER.number)
    outbox.send(raw, "billing", {"order": 7}, key=7)
    outbox.send(raw, "billing", b"order", key=sent)
    return outbox.send_many(session, [saf.Message(service="billing", body=ORDER)])


async def place_soon(session: AsyncSession) -> UUID:
    await session.run_sync(outbox.send, "billing", ORDER)
    return await outbox.asend(session, "billing", ORDER)
"""
# Each line with an error names mypy's code for it
WRONG = """

async def place(session: Session, soon: AsyncSession) -> str:
    OrderPlaced(number=7, total=1)  # arg-type
    outbox.send("dbname=shop", "billing", ORDER)  # arg-type
    outbox.send(soon, "billing", ORDER)  # arg-type
    outbox.send(session, "billing")  # call-arg
    outbox.send(session, ORDER)  # call-arg, arg-type
    outbox.send(session, 7, ORDER)  # arg-type
    outbox.send(session, "billing", ORDER, key=1.5)  # arg-type
    outbox.send(session, "billing", ORDER, keys="A-1")  # call-arg
    outbox.send(session, "billing", ORDER, expires_at="tomorrow")  # arg-type
    outbox.send_many(session, [ORDER])  # list-item
    saf.Message(service="billing")  # call-arg
    saf.Message(service="billing", body=ORDER, key=1.5)  # arg-type
    await outbox.asend(session, "billing", ORDER)  # arg-type
    saf.event("Refunded", key=7)  # arg-type
    return outbox.send(session, "billing", ORDER)  # return-value
"""


@pytest.mark.slow
def test_mypy_accepts_what_an_application_may_send_and_rejects_everything_else(
    tmp_path: Path,
) -> None:
    for name, text in (("right", RIGHT), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(EVENTS + text)
    expected = {
        (number, code)
        for number, line in enumerate((EVENTS + WRONG).splitlines(), 1)
        for code in line.partition("  # ")[2].split(", ")
        if code
    }
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    done = run([*command, "right.py", "wrong.py"], cwd=tmp_path, env={"MYPYPATH": str(ROOT)})
    found = re.findall(r"^(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in found} == {"wrong"}, done.stdout + done.stderr
    assert {(int(number), code) for _, number, code in found} == expected, done.stdout
