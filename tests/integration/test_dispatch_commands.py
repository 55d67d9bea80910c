"""`saf dispatch` and `saf endpoint`: what a person runs, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.receiving.dispatch import stored
from saf.webhooks import verify
from tests.endpoints import Partner, inbox, partner, state
from tests.pipeline import connect
from tests.programs import BIN, ROOT, configuration, environment, saf
from tests.receivers import dead, put
from tests.waits import until

__all__ = ["inbox", "partner"]

SECRET = "whsec_" + "c2Vj" * 8


@pytest.fixture
def config(app: Dsn, inbox: Dsn, partner: Partner, tmp_path: Path) -> Path:
    file = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": inbox})
    text = f'[endpoints.billing]\nurl = "{partner.url}?token=verysecret"\n'
    file.write_text(file.read_text() + text)
    return file


def test_one_shot_sends_what_is_there_and_says_so(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    put(inbox, "1", "2", "3", key="a")
    done = saf("dispatch", "--config", config)
    assert (done.returncode, done.stdout) == (0, "billing: handled 3 messages\n")
    assert partner.by_key() == {"a": [1, 2, 3]}
    partner.always(422, b"no such order")
    put(inbox, "4", key="a")
    done = saf("dispatch", "billing", "--config", config)
    assert done.returncode == 1
    assert dead(inbox) == [("4", "rejected")]
    history = saf("endpoint", "history", "billing", "--config", config).stdout
    assert "422" in history
    assert "no such order" in history


def test_an_endpoint_that_is_not_there_is_named_with_the_nearest(config: Path) -> None:
    done = saf("dispatch", "biling", "--config", config)
    assert done.returncode == 2
    assert done.stderr == ("saf: no endpoint 'biling' (did you mean 'billing'?)\n")


def test_a_paused_endpoint_gets_nothing_until_it_is_resumed(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    saf("endpoint", "pause", "billing", "--config", config)
    put(inbox, "1", key="a")
    assert saf("dispatch", "--config", config).returncode == 75
    assert partner.begun == []
    assert "up, paused" in saf("endpoint", "list", "--config", config).stdout
    saf("endpoint", "resume", "billing", "--config", config)
    assert saf("dispatch", "--config", config).returncode == 0
    assert partner.by_key() == {"a": [1]}


def test_an_endpoint_that_somebody_has_locked_is_tried_again_later(
    config: Path, inbox: Dsn
) -> None:
    config.write_text(config.read_text() + "[bounds]\nlock_seconds = 0.3\n")
    with connect(inbox) as other, other.transaction():
        other.execute("LOCK TABLE saf.breaker, saf.attempt IN ACCESS EXCLUSIVE MODE")
        for command in (
            ["pause", "billing"],
            ["resume", "billing"],
            ["history", "billing"],
            ["list"],
        ):
            done = saf("endpoint", *command, "--config", config)
            assert done.returncode == 75, (command, done.stderr)
            assert "the database of endpoint 'billing' does not answer" in done.stderr


def test_a_loop_learns_of_endpoints_that_are_added_and_removed(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    with connect(inbox) as connection:
        create_service(connection, "partner")
    with config.open("a") as more:
        more.write('[dispatch]\nnetworks = ["127.0.0.0/8"]\n')
    add = ("endpoint", "add", "partner", "--url", partner.url, "--config", config)
    with subprocess.Popen(
        [BIN / "saf", "dispatch", "--loop", "--config", config],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as loop:
        try:
            put(inbox, "1", key="a")
            until(lambda: len(partner.accepted) == 1)
            assert saf(*add).returncode == 0
            send = "INSERT INTO saf.inbox (to_service, body) VALUES ('partner', %s)"
            with connect(inbox) as connection:
                connection.execute(send, [b"2"])
                until(lambda: len(partner.accepted) == 2)
                saf("endpoint", "remove", "partner", "--config", config)
                until(lambda: members(inbox) == 1)
                connection.execute(send, [b"3"])
                put(inbox, "4", key="a")
                until(lambda: len(partner.accepted) == 3)
        finally:
            loop.send_signal(signal.SIGTERM)
            out, _ = loop.communicate(timeout=60)
    assert loop.returncode == 0
    assert [got.body for got in partner.accepted] == [b"1", b"2", b"4"]
    assert out == "billing: handled 2 messages\npartner: handled 1 message\n"


def test_a_loop_whose_endpoints_are_in_a_broker_that_is_away_begins_once_it_is_back(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    networks = '[dispatch]\nnetworks = ["127.0.0.0/8"]\n'
    config.write_text(config.read_text().partition("[endpoints.billing]")[0] + networks)
    with connect(inbox) as connection:
        stored.add(connection, "billing", partner.url, settings={})
    put(inbox, "1", key="a")
    allow = f"ALTER DATABASE {inbox.database} WITH ALLOW_CONNECTIONS"
    with connect(replace(inbox, conninfo=f"{inbox.conninfo} dbname=postgres")) as server:
        server.execute(f"{allow} false")
        with subprocess.Popen(
            [BIN / "saf", "dispatch", "--loop", "--config", config],
            env=environment(),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        ) as loop:
            try:
                assert loop.stderr is not None
                assert any("endpoints_not_read" in line for line in loop.stderr)
                server.execute(f"{allow} true")
                until(lambda: partner.accepted)
            finally:
                server.execute(f"{allow} true")
                loop.send_signal(signal.SIGTERM)
    assert loop.returncode == 0


def test_a_dead_letter_is_said_although_another_endpoint_cannot_go_on(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    config.write_text(config.read_text() + f'[endpoints.none]\nurl = "{partner.url}"\n')
    partner.always(422)
    put(inbox, "1", key="a")
    done = saf("dispatch", "--config", config)
    assert done.returncode == 1
    assert done.stdout.startswith("billing: handled 0 messages, made 1 dead letter\n")
    assert "no subscription 'none'" in done.stdout + done.stderr
    assert saf("dispatch", "--config", config).returncode == 2


def members(inbox: Dsn) -> int:
    with connect(inbox) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM saf.member")
    return int(count)


def test_peek_shows_what_the_endpoint_last_said_of_a_message(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    partner.always(503, b"down for maintenance", retry_after="1000")
    put(inbox, "1", "2", key="a")
    assert saf("dispatch", "--config", config).returncode == 75
    peeked = saf("inbox", "peek", "billing", "--config", config).stdout
    assert peeked.count("HTTP 503: down for maintenance") == 1
    done = saf("inbox", "peek", "billing", "--json", "--config", config)
    first, second = json.loads(done.stdout)["messages"]
    assert first["last_answer"] == "HTTP 503: down for maintenance"
    assert first["answered_at"] > first["received_at"]
    assert second["last_answer"] is None


def test_an_endpoint_that_is_gone_is_disabled_until_a_person_resumes_it(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    partner.always(410, b"moved away")
    put(inbox, "1", key="a")
    assert saf("dispatch", "--config", config).returncode == 75
    partner.answer = None
    assert saf("dispatch", "--config", config).returncode == 75
    (row,) = json.loads(saf("endpoint", "list", "--json", "--config", config).stdout)["endpoints"]
    assert (row["state"], row["error"]) == ("disabled", "HTTP 410: moved away")
    saf("endpoint", "resume", "billing", "--config", config)
    assert saf("dispatch", "--config", config).returncode == 0
    assert partner.by_key() == {"a": [1]}


def test_a_test_says_what_the_endpoint_answers_and_no_output_has_its_query(
    config: Path, partner: Partner
) -> None:
    done = saf("endpoint", "test", "billing", "--config", config)
    assert done.returncode == 0
    assert done.stdout.startswith("billing: HTTP 204 after ")
    (got,) = partner.accepted
    assert got.headers["ce-type"] == "saf.test"
    partner.always(500, b"oops")
    done = saf("endpoint", "test", "billing", "--config", config)
    assert done.returncode == 1
    assert "HTTP 500: oops" in done.stderr
    for command in (["list"], ["list", "--json"], ["show", "billing"], ["test", "billing"]):
        done = saf("endpoint", *command, "--config", config)
        assert "verysecret" not in done.stdout + done.stderr


def test_a_test_has_the_form_of_the_endpoint_and_calls_nothing(
    config: Path, partner: Partner
) -> None:
    text = config.read_text()
    for more, content_type in (
        ('mode = "structured"', "application/cloudevents+json"),
        ('mode = "batch"', "application/cloudevents-batch+json"),
        ('mode = "plain"\ntemplate = \'{"is": {{type}}}\'', "application/json"),
    ):
        config.write_text(f"{text}{more}\n")
        assert saf("endpoint", "test", "billing", "--config", config).returncode == 0
        got = partner.accepted[-1]
        assert got.headers["content-type"].startswith(content_type)
        assert b'"saf.test"' in got.body
    config.write_text(f'{text}mode = "xmlrpc"\nmethod = "book"\n')
    done = saf("endpoint", "test", "billing", "--config", config)
    assert (done.returncode, "is called by xmlrpc" in done.stderr) == (2, True)
    assert len(partner.begun) == 3


def test_show_says_no_query_of_a_token_url(config: Path) -> None:
    oauth = 'token_url = "https://login.example.com/token?key=verysecret"\n'
    oauth += 'client_id = "shop"\nclient_secret = "verysecret"\n'
    config.write_text(config.read_text() + oauth)
    for command in (["show", "billing"], ["show", "billing", "--json"]):
        done = saf("endpoint", *command, "--config", config)
        assert "https://login.example.com/token" in done.stdout
        assert "verysecret" not in done.stdout


@pytest.mark.parametrize("wrong", ["a variable", "a broker", "a name"])
def test_an_endpoint_or_broker_at_fault_holds_up_no_other_endpoint(
    app: Dsn, inbox: Dsn, partner: Partner, tmp_path: Path, wrong: str
) -> None:
    gone = {"gone": Dsn("host=127.0.0.1 port=1 dbname=gone")} if wrong == "a broker" else {}
    there = {"mom": inbox, **gone}
    config = configuration(tmp_path / "saf.toml", {"shop": app}, there)
    text = f'[endpoints.billing]\nurl = "{partner.url}"\nbroker = "mom"\n'
    lacks: dict[str, Any] = {"secrets": ["SAF_ENDPOINT_NONE"]}
    with connect(inbox) as connection:
        create_service(connection, "other")
        add = partial(stored.add, connection, url=partner.url)
        if wrong == "a name":
            add("billing", subscription="other", settings={})
        if wrong == "a variable":
            add("a", subscription="other", settings=lacks)
            add("billing", settings={})
            text = '[dispatch]\nnetworks = ["127.0.0.0/8"]\n'
    config.write_text(config.read_text() + text)
    put(inbox, "1", key="a")
    done = saf("dispatch", "--config", config)
    assert partner.by_key() == {"a": [1]}
    assert done.stdout.startswith("billing: handled 1 message\n")
    code = 75 if wrong == "a broker" else 2
    assert done.returncode == code
    listed = saf("endpoint", "list", "--config", config)
    assert (listed.returncode, partner.url in listed.stdout) == (code, True)
    assert listed.stderr.count("saf: ") == 1
    as_json = saf("endpoint", "list", "--json", "--config", config)
    assert [one["endpoint"] for one in json.loads(as_json.stdout)["endpoints"]] == ["billing"]
    assert as_json.returncode == code
    put(inbox, "2", key="a")
    with subprocess.Popen(
        [BIN / "saf", "dispatch", "--loop", "--config", config], env=environment(), cwd=ROOT
    ) as loop:
        try:
            until(lambda: len(partner.accepted) == 2)
        finally:
            loop.send_signal(signal.SIGTERM)
    assert loop.returncode == 0


def test_an_endpoint_that_is_added_again_begins_anew(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    config.write_text(
        config.read_text().partition("[endpoints.billing]")[0]
        + '[dispatch]\nnetworks = ["127.0.0.0/8"]\n'
    )
    add = ("endpoint", "add", "billing", "--url", partner.url, "--config", config)
    assert saf(*add).returncode == 0
    partner.always(410)
    put(inbox, "1", key="a")
    assert saf("dispatch", "--config", config).returncode == 75
    assert saf("endpoint", "remove", "billing", "--config", config).returncode == 0
    assert state(inbox) == "closed"
    assert saf(*add).returncode == 0
    partner.answer = None
    assert saf("dispatch", "--config", config).returncode == 0


def test_a_loop_that_is_told_to_stop_finishes_what_is_in_flight(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    partner.after(0.5)
    put(inbox, "1", "2", "3", key="a")
    process = subprocess.Popen(
        [BIN / "saf", "dispatch", "--loop", "--config", config],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: partner.in_flight == 1)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "billing: handled 1 message\n")
    assert partner.by_key() == {"a": [1]}
    with connect(inbox) as connection:
        assert connection.execute("SELECT FROM saf.member").rowcount == 0
    partner.answer = None
    assert saf("dispatch", "--config", config).returncode == 0
    assert partner.by_key() == {"a": [1, 2, 3]}


def test_an_endpoint_of_a_broker_reaches_no_address_inside_unless_saf_toml_names_its_network(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    config.write_text(config.read_text().partition("[endpoints.billing]")[0])
    assert "No endpoints in saf.toml or at " in saf("endpoint", "list", "--config", config).stdout
    assert saf("dispatch", "--config", config).returncode == 2
    variable = "SAF_ENDPOINT_PARTNER"
    added = saf(
        *("endpoint", "add", "partner", "--url", partner.url, "--subscription", "billing"),
        *("--secret-from", variable, "--config", config),
    )
    assert (added.returncode, added.stderr) == (0, "")
    put(inbox, "1", key="a")
    lacking = saf("dispatch", "--config", config)
    assert (lacking.returncode, variable in lacking.stderr) == (2, True)
    env = {variable: SECRET}
    saf("dispatch", "partner", "--config", config, env=env)
    assert partner.begun == []
    history = saf("endpoint", "history", "partner", "--config", config, env=env).stdout
    assert "its address is not on the public internet" in history
    config.write_text(config.read_text() + '[dispatch]\nnetworks = ["127.0.0.0/8"]\n')
    with connect(inbox) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    assert saf("dispatch", "--config", config, env=env).returncode == 0
    (got,) = partner.accepted
    assert verify(got.headers, got.body, SECRET) == got.id
    assert saf("endpoint", "remove", "partner", "--config", config).returncode == 0
    assert saf("endpoint", "remove", "partner", "--config", config).returncode == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "ftp://x"], "endpoint p.url: it is not a URL such as https://"),
        (["--secret-from", "MOM_DSN"], "an environment variable that begins with SAF_ENDPOINT_"),
        (["--rate", "0/s"], "endpoint p.rate: '0/s' is not a rate such as"),
        (["--subscription", "biling"], "biling"),
    ],
)
def test_a_wrong_endpoint_is_refused_in_one_sentence(
    config: Path, inbox: Dsn, options: list[str], says: str
) -> None:
    given = ["--url", "https://example.com", "--subscription", "billing", *options]
    done = saf("endpoint", "add", "p", *given, "--config", config)
    assert done.returncode == 2
    assert says in done.stderr
    with connect(inbox) as connection:
        assert connection.execute("SELECT FROM saf.endpoint").rowcount == 0


def test_who_writes_the_table_cannot_have_other_variables_sent(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    with connect(inbox) as connection:
        connection.execute(
            "INSERT INTO saf.endpoint (name, subscription_id, url, settings) SELECT 'evil', "
            'subscription_id, %s, \'{"bearer": "HOME"}\' FROM saf.subscription '
            "WHERE name = 'billing'",
            [partner.url],
        )
    done = saf("dispatch", "evil", "--config", config)
    assert (done.returncode, "SAF_ENDPOINT_" in done.stderr) == (2, True)
    assert partner.begun == []
