"""What ``saf transform try`` says of one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from saf.database import Dsn
from tests.programs import ROOT, configuration, saf

pytestmark = pytest.mark.full

SEND = """
INSERT INTO saf.outbox (to_service, key, headers, body)
VALUES ('billing', 'k', '{"a": 1}', convert_to(E'a\nb', 'UTF8')) RETURNING message_id
"""


def tried(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = saf("transform", "try", *arguments, "--json", cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert ("starting Spark …" in done.stderr) == bool(done.stdout)
    return done.returncode, json.loads(done.stdout or "{}") or {"error": done.stderr}


def test_a_message_of_an_outbox_is_shown_as_it_would_be_sent_and_stays(
    source: psycopg.Connection[Any], app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    path = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    functions = {"billing": "split", "audit": "number", "broken": "no_id", "labels": "labelled"}
    tables = [
        f'[[transforms]]\nservice = "{service}"\nfunction = "tests.transforms:{name}"\n'
        for service, name in functions.items()
    ]
    path.write_text(path.read_text() + "\n".join(tables))
    row = source.execute(SEND).fetchone()
    assert row is not None
    code, said = tried(tmp_path, "billing", "--message", str(row[0]))
    assert code == 0
    first, second = said["messages"]
    assert (first["message_id"], first["body"], second["body"]) == (str(row[0]), "a", "b")
    assert second["message_id"] != str(row[0])
    assert (second["key"], second["headers"]) == ("k", {"a": 1})
    assert source.execute("SELECT count(*) FROM saf.outbox").fetchone() == (1,)

    code, said = tried(tmp_path, "audit", "--body", "no number")
    assert code == 1
    assert "CAST_INVALID_INPUT" in said["dead"]
    code, said = tried(tmp_path, "labels", "--body", "no JSON")
    assert code == 1
    assert "headers that are not a JSON object" in said["dead"]
    code, said = tried(tmp_path, "broken", "--body", "1")
    assert code == 75
    assert "gives no column id" in said["waits"]
    code, said = tried(tmp_path, "biling", "--body", "1")
    assert code == 2
    assert "did you mean 'billing'?" in said["error"]
    code, said = tried(tmp_path, "billing")
    assert code == 2
    assert "either --message ID or --body TEXT" in said["error"]
