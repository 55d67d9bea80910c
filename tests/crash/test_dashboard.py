"""The visitor of a dashboard finds what is wrong with its answers, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from saf.database import Dsn
from saf.errors import Unavailable
from saf.ui import pages
from saf.ui.site import Visit
from tests.crash.dashboard import PAGES, visit, wrong
from tests.dashboard import dashboard, settings


@contextmanager
def _answers(file: Path, app: Dsn) -> Iterator[dict[str, str]]:
    """What is wrong with each page, for one who has seen all of them, and has pressed a button."""
    with dashboard(settings(file, {"app": app}, {"mom": app})) as there:
        visited = islice(visit(there.url), len(PAGES) + 1)
        yield {path: why for path, answer in visited if (why := wrong(answer))}


def _instead_of(path: str, page: Callable[[Visit], Any]) -> dict[str, pages.Page]:
    return {**pages.PAGES, path: pages.Page(page=page)}


def test_pages_of_a_dashboard_are_answered(app: Dsn, tmp_path: Path) -> None:
    with _answers(tmp_path / "saf.toml", app) as found:
        assert found == {}


def test_a_page_that_raises_is_found(
    app: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saf.ui.application.PAGES", _instead_of("/dead", lambda _: 1 / 0))
    with _answers(tmp_path / "saf.toml", app) as found:
        assert found == {"/dead": "500: Internal Server Error"}


def test_an_honest_word_that_a_database_does_not_answer_is_no_finding(
    app: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def honest(_: Visit) -> None:
        raise Unavailable("broker 'app'", "it is in recovery")

    monkeypatch.setattr("saf.ui.application.PAGES", _instead_of("/dead", honest))
    with _answers(tmp_path / "saf.toml", app) as found:
        assert found == {}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(503, text="in maintenance"), "503: in maintenance"),
        (httpx.Response(404, text="no such page"), ""),
        (None, "no answer in 30 s"),
    ],
)
def test_what_is_wrong_is_said(answer: httpx.Response | None, why: str) -> None:
    assert wrong(answer) == why
