"""docs/tracing.md: its commands and code do what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from saf.database import Dsn
from saf.telemetry.carried import LARGE, LONGEST
from saf.telemetry.tracing import MOST_LINKS, MOST_LOOKED_AT, SCHEMA
from tests.pages import blocks, page, prepared, shell
from tests.programs import INSTALLED, send
from tests.receivers import put

pytestmark = pytest.mark.full

PAGE = page("tracing.md")


@pytest.mark.slow
def test_the_forwarder_shows_a_span_for_its_chunk(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    prepared(tmp_path, app, mom)
    send(app, 3)
    (script,) = blocks(PAGE, "shell")
    lines = [line for line in script.splitlines() if not line.startswith("pip install")]
    said = shell("\n".join(lines), tmp_path, app, mom, path=INSTALLED)
    assert '"name": "send mom"' in said
    assert '"messaging.batch.message_count": 3' in said
    assert '"service.name": "forwarder"' in said


def test_the_code_receives_and_logs(
    app: Dsn,
    mom: Dsn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepared(tmp_path, app, mom)
    put(mom, '{"order": 7}')
    monkeypatch.setenv("MOM_DSN", mom.conninfo)
    receives, logs = blocks(PAGE, "python")
    exec(receives, {})  # noqa: S102 - the page's own
    assert capsys.readouterr().out == "{'order': 7}\n"
    try:
        exec(logs, {})  # noqa: S102 - the same
        assert structlog.is_configured()
    finally:
        structlog.reset_defaults()


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"more than {LARGE // 1024} KiB get no context" in text
    assert f"longer than {LONGEST // 1024} KiB" in text
    assert f"link to at most {MOST_LINKS}" in text
    assert f"conventions for messaging {SCHEMA.rpartition('/')[2]}" in text
    assert f"links to at most {MOST_LINKS}" in text
    assert text.count(f"{MOST_LOOKED_AT:,}") == 2
