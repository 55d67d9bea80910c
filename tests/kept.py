"""Connections that a task keeps for the next one, closed with the test that made them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from saf.database import connections


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    connections.forget()
