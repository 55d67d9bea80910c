"""Tests of what Spark itself has a part in."""

from __future__ import annotations

import pytest

from tests.programs import USE_SPARK


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """``saf forward`` uses Spark for little work, too."""
    monkeypatch.setenv(USE_SPARK, "always")
