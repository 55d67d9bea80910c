"""Lists go on page after page in commands, and each of their rows is shown once."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from saf.database import Dsn
from saf.setaside.waiting import parked, place_at
from tests.long_lists import DECISIONS, DIALOGS, FOREIGN, LANES, LETTERS, PARKED
from tests.pipeline import connect
from tests.programs import configuration, saf

LISTS = [
    (("parked", "list"), "parked", "subject", LANES, 430),
    (("dead", "audit"), "audit", "why", DECISIONS, 120),
    (("dialog", "list"), "conversations", "service", DIALOGS, 230),
    (("parked", "messages"), "parked", "key", PARKED, 120),
    (("dead", "list"), "dead_letters", "key", LETTERS, 120),
]


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


@pytest.mark.parametrize(("command", "rows", "name", "many", "count"), LISTS)
def test_page_after_page_shows_everything_once(
    app: Dsn, config: Path, *, command: tuple[str, ...], rows: str, name: str, many: str, count: int
) -> None:
    with connect(app) as connection:
        connection.execute(many)
    seen: list[str] = []
    options = ["--limit", "100", "--broker", "shop", "--config", str(config)]
    after: str | None = None
    for _ in range(count // 100 + 1):
        more = [] if after is None else ["--after", after]
        answer = json.loads(saf(*command, "--json", *options, *more).stdout)
        seen += [row[name] for row in answer[rows]]
        after = answer["next"]["shop"]
        if after is None:
            break
    assert (after, len(seen), len(set(seen))) == (None, count, count)


@pytest.mark.parametrize(("command", "rows", "name", "many", "count"), LISTS)
def test_a_page_says_the_command_that_goes_on(
    app: Dsn, config: Path, *, command: tuple[str, ...], rows: str, name: str, many: str, count: int
) -> None:
    with connect(app) as connection:
        connection.execute(many)
    options = ["--limit", "50", "--config", str(config)]
    first = saf(*command, "--broker", "shop", *options).stdout
    said = re.search(r"shop: continue with (--broker shop --after .+)", first)
    assert said is not None, first
    second = saf(*command, *shlex.split(said[1]), "--json", *options)
    whole = json.loads(
        saf(
            *command, "--json", "--broker", "shop", "--config", config, "--limit", str(count)
        ).stdout
    )
    names = [row[name] for row in whole[rows]]
    assert [row[name] for row in json.loads(second.stdout)[rows]] == names[50:100]
    assert whole["next"] == {"shop": None}


@pytest.mark.parametrize("command", [*(command for command, *_ in LISTS), ("outbox", "list")])
def test_what_no_page_ends_with_is_refused(config: Path, command: tuple[str, ...]) -> None:
    for after in FOREIGN:
        done = saf(*command, "--broker", "shop", "--after", after, "--config", config)
        assert (done.returncode, done.stdout) == (2, ""), after
        place = re.escape(repr(after))
        sentence = f"saf: no page of .+ ends at {place}: use the place at the end of the page"
        assert re.match(sentence, done.stderr), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_numbers_of_commands_have_ranges_that_a_database_takes(config: Path) -> None:
    for command in (
        *(["dead", "list"], ["dead", "show"], ["dead", "discard"], ["parked", "messages"]),
        *([*command, "--limit"] for command, *_ in LISTS),
    ):
        done = saf(*command, "9223372036854775808", "--config", config)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "less than or equal to " in done.stderr, done.stderr
    done = saf("outbox", "list", "--since", "0001-01-01T00:00:00+14:00", "--config", config)
    assert (done.returncode, "is not a time such as" in done.stderr) == (2, True), done.stderr


def test_a_page_goes_on_in_one_broker(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    two = configuration(tmp_path / "saf.toml", {"shop": app, "other": mom}, {"mom": mom})
    done = saf("dead", "audit", "--after", "7", "--config", two)
    assert (done.returncode, "add --broker with one of shop, other" in done.stderr) == (
        2,
        True,
    )


def test_lanes_that_go_meanwhile_leave_no_gap(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(LANES)
        first = parked(connection, 100)
        gone = [lane.subject for lane in first.shown[:60]]
        connection.execute("DELETE FROM saf.backoff WHERE subject = ANY (%s)", [gone])
        second = parked(connection, 400, after=place_at(first.next))
    assert (len(second.shown), second.lanes, second.next) == (330, 370, None)
