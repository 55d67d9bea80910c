"""`saf dispatch` and `saf endpoint`: what a person runs, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.endpoints import Partner, serving
from tests.pipeline import connect
from tests.programs import BIN, ROOT, configuration, environment, saf
from tests.receivers import dead, prepare, put
from tests.waits import until


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    return mom


@pytest.fixture
def partner() -> Iterator[Partner]:
    with serving(Partner()) as one:
        yield one


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
    assert done.stderr == ("saf: there is no [endpoints.biling] (did you mean 'billing'?)\n")


def test_a_paused_endpoint_gets_nothing_until_it_is_resumed(
    config: Path, inbox: Dsn, partner: Partner
) -> None:
    saf("endpoint", "pause", "billing", "--config", config)
    put(inbox, "1", key="a")
    assert saf("dispatch", "--config", config).returncode == 75
    assert partner.begun == []
    assert "closed, paused" in saf("endpoint", "list", "--config", config).stdout
    saf("endpoint", "resume", "billing", "--config", config)
    assert saf("dispatch", "--config", config).returncode == 0
    assert partner.by_key() == {"a": [1]}


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
