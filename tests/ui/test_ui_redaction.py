"""What is hidden in bodies: also in parts of JSON, behind a BOM, and where it is nested deeply."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saf.config import Ui
from saf.database import Dsn
from saf.errors import HIDDEN
from saf.ui.redaction import LARGEST_BYTES, Redaction
from tests.dashboard import dashboard, message_id, settings
from tests.pipeline import connect

SEND = """
INSERT INTO saf.outbox (to_service, key, headers, body) VALUES ('billing', %s, %s::jsonb, %s)
"""
SECRET = "pa55-w0rd"
WHOLE = f'{{"user": "ann", "password": "{SECRET}"}}'
PATHS = Redaction(Ui(redact_paths=("$..password",)))


def typed(kind: str, **more: object) -> str:
    return json.dumps({"content-type": kind, **more})


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"\xef\xbb\xbf" + WHOLE.encode(), typed("application/json")),
        (b"\xef\xbb\xbf" + WHOLE.encode(), typed("text/plain")),
        (WHOLE[2:].encode(), None),
        (WHOLE[2:].encode(), "{}"),
        (WHOLE[2:].encode(), "[]"),
        (WHOLE[2:].encode(), typed("application/vnd.shop+JSON")),
        (WHOLE[2:].encode(), typed("text/plain", **{"saf-fragment": 2})),
        (WHOLE[2:].encode(), typed("text/plain", **{"saf-whole": {"fragments": 2, "bytes": 9}})),
        (f"{WHOLE}\n{WHOLE}".encode(), typed("application/x-ndjson")),
        (WHOLE.encode("utf-16-le"), typed("application/json")),
        (json.dumps(WHOLE).encode(), typed("application/json")),
        (f'{{"n": {"9" * 5000}, "password": "{SECRET}"}}'.encode(), typed("application/json")),
    ],
)
def test_what_paths_name_is_seen_in_no_json_and_no_part_of_any(
    body: bytes, headers: str | None
) -> None:
    seen = PATHS.body(body, headers).replace("\\x00", "")
    assert SECRET not in seen
    assert HIDDEN in seen or "not shown" in seen


def test_what_says_that_it_is_something_else_is_shown_and_without_paths_everything_is() -> None:
    assert PATHS.body(b"a;b", typed("text/csv")) == "a;b"
    assert Redaction(Ui()).body(b"a;b", None) == "a;b"
    assert Redaction(Ui()).body(b'"{"', None) == PATHS.body(b'"("', None).replace("(", "{") == '"{"'
    assert "not shown" in PATHS.body(b'"{"', None)
    assert Redaction(Ui()).body(WHOLE[2:].encode(), None) == WHOLE[2:]


@pytest.mark.parametrize("depth", [900, 1000, 1200, 1500, 5000, 100_000])
def test_json_is_shown_however_deep_or_it_is_said_that_it_is_too_deep(depth: int) -> None:
    for body in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        for redaction in (Redaction(Ui()), PATHS):
            shown = redaction.body(body, None)
            assert "nested too deeply" in shown or "characters more" in shown


def test_bodies_of_any_size_and_form_are_shown_or_it_is_said_why_not(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    half = WHOLE[2:].encode()
    large = b"x" * (LARGEST_BYTES + 1)
    deep = b"[" * 1200 + b"]" * 1200
    sent = {
        "bom": (typed("application/json"), b"\xef\xbb\xbf" + WHOLE.encode(), HIDDEN),
        "half": (typed("text/plain", **{"saf-fragment": 2}), half, "not shown"),
        "large": (typed("text/plain"), large, "1,048,577 bytes: more than are shown"),
        "fits": (typed("text/plain"), large[1:], "characters more"),
        "deep": (typed("application/json"), deep, ""),
    }
    with connect(app) as connection:
        for key, (headers, body, _) in sent.items():
            connection.execute(SEND, [key, headers, body])
    ui = 'bodies = true\nredact_paths = ["$..password"]'
    with dashboard(settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, ui)) as there:
        visitor = there.client()
        for key, (_, _, said) in sent.items():
            page = visitor.get("/message", params={"id": message_id(app, key)})
            assert page.status_code == 200, key
            assert said in page.text, key
            assert SECRET not in page.text
            assert len(page.text) < 200_000
