"""What a finding leaves behind is kept, in words that one can search."""

from __future__ import annotations

import json
from pathlib import Path

from saf.database import Dsn
from tests.crash.evidence import keep
from tests.pipeline import connect, send


def test_each_row_of_each_broker_is_a_line_and_one_that_is_away_says_why(
    app: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        send(connection, "the last one", key="k")
        connection.execute("CREATE TABLE account (name text)")
        connection.execute("INSERT INTO account VALUES ('k')")
    away = Dsn(f"host={tmp_path} dbname=mom")
    keep({"app": app, "mom": away}, {"commands": ["saf rebase: 0"]}, tmp_path / "kept")
    kept = tmp_path / "kept"
    lines = [json.loads(line) for line in (kept / "app.jsonl").read_text().splitlines()]
    assert ["public.account", {"name": "k"}] in lines
    (message,) = [row for table, row in lines if table == "saf.outbox"]
    assert message["body"] == "the last one"
    ((table, why),) = [json.loads(line) for line in (kept / "mom.jsonl").read_text().splitlines()]
    assert (table, str(tmp_path) in why) == ("error", True)
    assert (kept / "commands").read_text() == "saf rebase: 0\n"
