"""What somebody has sent is shown to an operator, and never commands the terminal."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from saf.broker.services import create_service
from saf.database import Dsn
from saf.operating.wording import shown
from tests.hostile import unbounded
from tests.pipeline import connect, forward
from tests.programs import BIN, ROOT, configuration, environment, saf
from tests.terminals import on_a_terminal

COMMANDS_OF_A_TERMINAL = "\x1b]0;owned\x07\x1b[2J\x9b\u202eevil\u2066\u200f\r\n"
NAME = f"x{COMMANDS_OF_A_TERMINAL}y"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

DEEP = f'{{"x": {"[" * 3000}{"]" * 3000}}}'
DIGITS = f'{{"x": {"9" * 5001}}}'
GROWING = f"[{','.join(['1e100000'] * 10_000)}]"


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Brokers with hostile names, keys, types, headers and errors in every place."""
    for dsn in (app, mom):
        unbounded(dsn)
    with connect(app) as connection, connect(mom) as store:
        create_service(store, "billing")
        for service in ("billing", NAME):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, message_type, body) "
                "VALUES (%s, %s, %s, %s)",
                (service, NAME, NAME, NAME.encode()),
            )
        connection.execute(
            "INSERT INTO saf.route (service, destination, comment) VALUES ('c', 'mom', %s)", [NAME]
        )
        connection.execute(
            "WITH g AS (INSERT INTO saf.conversation_group DEFAULT VALUES RETURNING group_id) "
            "INSERT INTO saf.conversation (conversation_id, is_initiator, service, far_service, "
            "group_id, send_sequence, error_code, error_text) "
            "SELECT gen_random_uuid(), true, 's', %s, group_id, 1, 1, %s FROM g",
            (NAME, NAME),
        )
    forward(app, mom=mom)
    with connect(app) as connection:
        for headers in (DEEP, DIGITS, GROWING, "[1]"):
            connection.execute(
                "INSERT INTO saf.dead_letter (subscription_id, shard, id, to_service, key, "
                "message_type, headers, body, reason, error) "
                "VALUES (1, 1, 1, %s, %s, %s, %s, %s, 'failed', %s)",
                (NAME, NAME, NAME, headers, NAME.encode(), NAME),
            )
    return configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})


SHOWING = [
    ("status",),
    ("parked", "list"),
    ("dead", "list"),
    ("inbox", "status"),
    ("inbox", "peek", "billing"),
    ("dialog", "list"),
    ("route", "list"),
    ("route", "explain", NAME, "--key", NAME),
    ("doctor",),
]


def test_no_command_lets_what_was_sent_command_the_terminal(config: Path) -> None:
    shown_by = {}
    for command in SHOWING:
        done = saf(*command, "--config", config)
        said = shown_by[command] = done.stdout + done.stderr
        assert not RAW.search(said), (command, said)
        as_json = saf(*command, "--json", "--config", config)
        assert not RAW.search(as_json.stdout), command
        json.loads(as_json.stdout)
    for command in (("parked", "list"), ("dialog", "list"), ("dead", "list")):
        assert "\\x1b" in shown_by[command], command


def test_every_dead_letter_is_listed_and_shown_whatever_is_in_it(config: Path) -> None:
    listed = json.loads(saf("dead", "list", "--json", "--config", config).stdout)["dead_letters"]
    headers = [letter.get("headers") for letter in listed]
    assert headers[0].startswith('{"x": [[[')
    assert headers[1] == DIGITS
    assert headers[2:] == [None, [1]]
    number = str(listed[0]["number"] if "number" in listed[0] else listed[0]["dead_letter_id"])
    show = ["dead", "show", number, "--broker", "app", "--config", str(config)]
    assert not RAW.search(saf(*show).stdout)
    show.append("--body")
    done = subprocess.run([BIN / "saf", *show], env=environment(), capture_output=True, check=True)
    assert done.stdout == NAME.encode()
    assert on_a_terminal(*show).replace("\r\n", "\n") == shown(NAME, lines=True)


def test_commands_print_in_one_way() -> None:
    for file in (ROOT / "saf" / "cli").glob("*.py"):
        if file.name != "console.py":
            other = re.search(r"typer\.(s?echo)|[^.\w]print\(|Console\(|stdout\.(buffer|write)",
                              file.read_text())  # fmt: skip
            assert other is None, (file.name, other)


@pytest.mark.parametrize("text", ["Zürich 東京\u00a0€", "a b", ""])
def test_what_does_no_harm_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text
