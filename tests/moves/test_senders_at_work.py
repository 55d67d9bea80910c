"""Senders that are at work do not make a broker look moved or set back."""

from __future__ import annotations

from typing import Any

import pytest

from saf.database import Dsn, fetch
from saf.log import lineage
from tests.pipeline import connect, send


@pytest.mark.parametrize("whole", [False, True])
def test_a_message_that_is_committed_between_two_questions_is_no_problem(
    app: Dsn, monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    def fetch_and_send(*asked: Any) -> list[tuple[Any, ...]]:
        rows = fetch(*asked)
        with connect(app) as sender:
            send(sender, "meanwhile")
        return rows

    with connect(app) as connection:
        send(connection, "first")
        monkeypatch.setattr(lineage, "fetch", fetch_and_send)
        assert [*lineage.problems(connection, whole=whole)] == []
