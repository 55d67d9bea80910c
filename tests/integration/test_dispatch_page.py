"""docs/dispatch.md: its commands, settings and code do what the page says."""

from __future__ import annotations

import http.client
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import saf.webhooks
from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn, fetch
from saf.signing.webhook import key_of, sign
from tests.endpoints import Partner, serving
from tests.pipeline import connect
from tests.programs import ROOT, activated, configuration, run
from tests.receivers import prepare, put

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "dispatch.md").read_text()
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
SECRET = "whsec_" + "c2Vj" * 8


def shell(text: str, cwd: Path, partner: Partner) -> str:
    """What a block prints; the loop is told to stop after a while."""
    lines = re.sub(r"https://\w+\.example\.com/hooks", partner.url, text).splitlines()
    lines = [line for line in lines if not line.startswith("pip install")]
    loop = "timeout -s TERM 3 saf dispatch --loop || test $? = 124 #"
    done = run(
        ["bash", "-euxc", "\n".join(lines).replace("saf dispatch --loop", loop)],
        env={"PATH": activated(), "SAF_ENDPOINT_PARTNER": SECRET},
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_five_lines_send_the_first_webhook(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    prepare(mom)
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    put(mom, "1", "2", key="a")
    with serving(Partner()) as partner:
        said = shell(BLOCKS["first"], tmp_path, partner)
        assert "billing: handled 2 messages" in said
        assert [got.headers["ce-type"] for got in partner.accepted] == [
            *("saf.test", "saf.message", "saf.message"),
        ]
        shell(BLOCKS["shell"], tmp_path, partner)


def test_its_stored_endpoint_gets_what_is_signed(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    prepare(mom)
    with connect(mom) as connection:
        create_service(connection, "partner")
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('partner', '1')")
    file = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    with file.open("a") as more:
        more.write('[dispatch]\nnetworks = ["127.0.0.0/8"]\n')
    with serving(Partner()) as partner:
        said = shell(BLOCKS["stored"], tmp_path, partner)
    assert "partner: handled 1 message\n" in said
    (got,) = partner.accepted
    assert saf.webhooks.verify(got.headers, got.body, SECRET) == got.id


def test_its_settings_are_settings(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    file.write_text(file.read_text() + BLOCKS["settings"] + BLOCKS["oauth"])
    monkeypatch.setenv("ORDERS_SECRET", "verysecret")
    monkeypatch.setenv("BILLING_SECRET", SECRET)
    monkeypatch.setenv("BILLING_TOKEN", "verysecret")
    settings = load(file)
    assert settings.endpoints["billing"].keys == [key_of(SECRET)]
    for text in (repr(settings), settings.model_dump_json(), str(settings)):
        assert SECRET not in text
        assert "verysecret" not in text


def test_its_replies_are_settings(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    file = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    file.write_text(file.read_text() + BLOCKS["reply"] + BLOCKS["template"])
    assert load(file).endpoints["chat"].template is not None
    assert load(file).endpoints["billing"].one_reply == ("asking",)


def test_its_receiver_verifies_what_is_signed() -> None:
    headers = sign("one", int(time.time()), b"{}", [key_of(SECRET)])
    names = {"headers": headers, "body": b"{}", "secret": SECRET, "old_secret": SECRET}
    exec(BLOCKS["verify"], names)  # noqa: S102 - the page's own
    assert names["message_id"] == "one"
    with pytest.raises(saf.NotVerified):
        exec(BLOCKS["verify"], {**names, "body": b"[]"})  # noqa: S102 - the same


def test_the_states_that_it_draws_are_those_of_the_schema(mom: Dsn) -> None:
    with mom.connect(role="test") as connection:
        ((check,),) = fetch(
            connection,
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'breaker_state'",
        )
    states = re.findall(r"'(\w+)'", check)
    assert len(states) == 3
    picture = PAGE.partition("## When an endpoint is down")[2]
    for state in states:
        assert f" {state} " in picture


def test_its_inbox_stores_what_is_sent_to_it(mom: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(mom)
    monkeypatch.setenv("INBOX", mom.conninfo)
    monkeypatch.setenv("BILLING_SECRET", SECRET)
    names: dict[str, Any] = {}
    exec(BLOCKS["inbox"], names)  # noqa: S102 - the page's own
    headers = {
        **{"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "Paid"},
        **sign("7", int(time.time()), b"{}", [key_of(SECRET)]),
    }
    with serving(Partner(), names["app"]) as partner:
        parts = urlsplit(partner.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        connection.request("POST", parts.path, b"{}", headers)
        assert connection.getresponse().status == 204
        connection.close()
    with connect(mom) as there:
        assert fetch(there, "SELECT to_service FROM saf.inbox") == [("billing",)]
