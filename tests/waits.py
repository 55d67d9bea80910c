"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

from saf.database import fetch

WAITERS = """
SELECT count(DISTINCT pid) FROM pg_locks
WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))
"""
BLOCKED = """
SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE NOT granted AND datname = current_database()
"""

OFTEN_SECONDS = 0.01


def until(condition: Callable[[], Any], seconds: float = 60) -> float:
    """Wait until something is so; return after how many seconds it was."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never came to that"
        time.sleep(OFTEN_SECONDS)
    return time.monotonic() - began


def waiters(connection: psycopg.Connection[Any]) -> int:
    """How many sessions wait for what this one has locked."""
    ((count,),) = fetch(connection, WAITERS)
    return int(count)


def blocked(connection: psycopg.Connection[Any]) -> int:
    """How many sessions of this database wait for a lock, whoever has it."""
    ((count,),) = fetch(connection, BLOCKED)
    return int(count)
