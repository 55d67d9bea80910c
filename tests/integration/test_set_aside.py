"""``saf parked``, ``saf dead`` and ``saf rebase`` as an operator types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from saf.database import Dsn, fetch
from saf.setaside.waiting import Lanes, parked
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, send
from tests.programs import BIN, configuration, environment, saf
from tests.terminals import on_a_terminal
from tests.waits import until, waiters

NOWHERE = Dsn("host=/nonexistent dbname=other")


@pytest.fixture
def config(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


@pytest.fixture
def aside(app: Dsn, mom: Dsn) -> None:
    """One message forwarded, three parked, and two dead."""
    with connect(mom) as store, connect(app) as connection:
        store.execute(
            "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') <> 'x')"
        )
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('ship', 'other')")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) "
            "SELECT 'ship', 'k', 'y' FROM generate_series(1, 3)"
        )
        for body in ("x", "y", "x"):
            send(connection, body, key="[/]")
        with Cycle(app, forwarding_rules(mom=mom, other=NOWHERE)) as cycle:
            cycle.run()
        # a command may take longer to start than the first wait
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'")


def answer(*arguments: str | Path, config: Path) -> dict[str, Any]:
    done = saf(*arguments, "--config", config, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.usefixtures("aside")
def test_status_says_what_is_parked_why_and_when_it_is_tried_next(config: Path) -> None:
    (broker,) = answer("status", config=config)["brokers"]
    assert (broker["parked"], broker["dead_letters"], broker["pending"]) == (3, 2, 0)
    (lane,) = broker["lanes"]
    assert (lane["destination"], lane["attempts"], lane["messages"]) == ("other", 1, 3)
    assert "nonexistent" in lane["error"]
    said = saf("status", "--config", config).stdout
    assert "shop 3 destination 'other' forwarder 1 2" in " ".join(said.split())


@pytest.mark.usefixtures("aside")
def test_parked_lists_the_lanes_and_retry_now_makes_them_due(config: Path) -> None:
    (lane,) = answer("parked", "list", config=config)["parked"]
    assert not lane["due"]
    assert answer("parked", "retry-now", config=config)["lanes"] == {"mom": 0, "shop": 1}
    (lane,) = answer("parked", "list", config=config)["parked"]
    assert lane["due"]
    assert " due since 20" in saf("parked", "list", "--config", config).stdout
    done = saf("parked", "retry-now", "--destination", "mom", "--config", config)
    nothing = "No matching parked messages at mom, shop. Nothing is retried.\n"
    assert done.stdout == nothing


@pytest.mark.usefixtures("aside")
def test_retry_now_names_the_first_keys_of_the_lanes_as_other_decisions_do(
    config: Path, app: Dsn
) -> None:
    done = saf("parked", "retry-now", "--config", config)
    assert done.stdout == "shop: 1 lane to be tried by the next run (k)\n"
    with connect(app) as connection:
        connection.execute(OF_A_KEY)
        connection.execute("UPDATE saf.parked SET key = 'k-' || parked_id WHERE kind = 'main'")
    done = saf("parked", "retry-now", "--config", config)
    assert done.stdout.startswith("shop: 2 lanes to be tried by the next run (k-1, k-2, k-3, …)")


OF_A_KEY = """
INSERT INTO saf.subscription (name, log) VALUES ('reader', 'inbox');
INSERT INTO saf.parked
    (subscription_id, kind, subject, shard, id, batch, position, to_service, body)
SELECT subscription_id, kind, 'A-1', 7, 7, 1, 7, 's', ''
FROM saf.subscription, (VALUES ('key'), ('later')) AS k (kind) WHERE name = 'reader';
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error)
SELECT subscription_id, '', 'key', 'A-1', 7, 'it fails' FROM saf.subscription WHERE name = 'reader'
"""


@pytest.mark.usefixtures("aside")
def test_every_lane_is_listed_also_a_receivers_behind_those_of_the_forwarder(
    config: Path, app: Dsn
) -> None:
    with connect(app) as connection:
        connection.execute(OF_A_KEY)
    few = answer("parked", "list", "--limit", "1", config=config)
    assert [lane["destination"] for lane in few["parked"]] == ["other"]
    assert few["lanes"] == {"mom": 0, "shop": 3}
    mine = answer("parked", "list", "--subscription", "reader", "--limit", "2", config=config)
    assert mine["lanes"] == {"mom": 0, "shop": 2}
    key, later = sorted(mine["parked"], key=lambda lane: str(lane["kind"]))
    assert (key["kind"], key["subject"], key["messages"]) == ("key", "A-1", 1)
    assert (later["kind"], later["subject"], later["messages"]) == ("later", "A-1", 1)
    assert "nothing in saf.backoff says" in later["error"], "nobody would try it"
    said = saf("parked", "list", "--subscription", "reader", "--config", config).stdout
    assert "shop 1 next attempt of reader for key 'A-1' reader 0 due since" in " ".join(
        said.split()
    )


@pytest.mark.usefixtures("aside")
def test_dead_letters_are_listed_shown_retried_and_discarded(
    config: Path, app: Dsn, mom: Dsn
) -> None:
    first, second = answer("dead", "list", config=config)["dead_letters"]
    assert (first["reason"], first["service"], first["key"]) == ("rejected", "billing", "[/]")
    assert "polite" in first["error"]
    assert "[/]" in saf("dead", "list", "--reason", "rejected", "--config", config).stdout
    number = str(first["dead_letter_id"])
    shop = ("--broker", "shop", "--config", config)
    assert saf("dead", "show", number, "--body", *shop).stdout == "x"
    lines = saf("dead", "show", number, *shop).stdout.splitlines()
    details = [line.split("  ", 1) for line in lines]
    assert [name for name, _ in details[:5]] == ["what", "error", "message id", "key", "service"]
    assert "polite" in details[1][1]

    dry = answer("dead", "retry", "--all", "--dry-run", config=config)["dead_letters"]
    assert dry == [first, second]
    done = saf("dead", "discard", number, "--why", "a test", "--yes", *shop)
    assert done.stdout == "shop: 1 dead letter discarded ([/])\n"
    retried = answer("dead", "retry", "--service", "billing", config=config)["message_ids"]
    assert retried == {"mom": [], "shop": [second["message_id"]]}
    assert answer("dead", "list", config=config)["dead_letters"] == []
    with connect(mom) as store:
        store.execute("ALTER TABLE saf.inbox DROP CONSTRAINT polite")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.run()
    assert bodies(mom) == ["y", "x"]


@pytest.mark.usefixtures("aside")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["dead", "discard", "1"], "dead letter 1"),
        (["dead", "redirect", "1", "--to", "mom"], "dead letter 1"),
        (["parked", "discard", "1"], "parked message 1"),
        (["parked", "redirect", "1", "--to", "mom"], "parked message 1"),
    ],
)
def test_what_a_number_names_is_decided_about_in_one_broker_only(
    config: Path, arguments: list[str], what: str
) -> None:
    done = saf(*arguments, "--config", config)
    command = f"`saf {' '.join(arguments)} --config {config} --broker shop`"
    refusal = f"saf: numbers are different at each broker, and {what} is at shop: {command}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", refusal)
    assert answer("dead", "list", "--count", config=config)["dead_letters"]["shop"] == 2


@pytest.mark.usefixtures("aside")
def test_a_number_of_one_broker_alone_needs_no_broker_where_nothing_can_be_lost(
    tmp_path: Path, app: Dsn, mom: Dsn, other: Dsn, config: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"shop": app, "till": other}, {"mom": mom})
    assert "polite" in saf("dead", "discard", "1", "--dry-run", "--config", config).stdout
    assert "polite" in saf("dead", "show", "1", "--config", config).stdout
    done = saf("dead", "retry", "1", "--config", config)
    assert done.stdout == "shop: 1 dead letter set to be retried by the next `saf forward` ([/])\n"
    done = saf("dead", "retry", "17", "--config", config)
    refusal = "saf: no dead letter 17 at mom, shop, till; see `saf dead list`\n"
    assert (done.returncode, done.stderr) == (2, refusal)
    done = saf("dead", "show", "17", "--broker", "shop", "--config", config)
    refusal = "saf: no dead letter 17 at shop; see `saf dead list`\n"
    assert (done.returncode, done.stderr) == (2, refusal)
    done = saf("outbox", "show", "1", "--config", config)
    refusal = "numbers are different at each broker: add --broker with one of mom, shop, till\n"
    assert (done.returncode, done.stderr) == (2, f"saf: {refusal}")


def test_a_number_that_several_brokers_know_is_retried_at_none(
    config: Path, app: Dsn, mom: Dsn
) -> None:
    for dsn in (app, mom):
        with connect(dsn) as connection:
            connection.execute(MANY, [2])
    done = saf("dead", "retry", "1", "--config", config)
    command = f"`saf dead retry 1 --config {config} --broker mom`"
    assert done.returncode == 2
    assert f"dead letter 1 is at mom, shop: {command}" in done.stderr
    assert answer("dead", "list", "--count", config=config)["dead_letters"] == {"mom": 2, "shop": 2}


def test_an_unknown_failure_group_is_refused(config: Path) -> None:
    refusal = "no group 0123456789ab at mom, shop; see `saf dead groups`"
    for command in (["dead", "retry"], ["dead", "discard", "--yes"]):
        done = saf(*command, "--group", "0123456789ab", "--config", config)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"saf: {refusal}\n")
    done = saf("parked", "retry-now", "--group", "0123456789ab", "--config", config)
    assert (done.returncode, "see `saf parked groups`" in done.stderr) == (2, True)


def test_brokers_that_cannot_be_reached_are_named_before_what_the_others_have(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    config = configuration(tmp_path / "saf.toml", {"shop": app, "till": NOWHERE}, {"mom": mom})
    shown = on_a_terminal("dead", "list", "--config", str(config), columns=300)
    assert shown.index("broker 'till'") < shown.index("No dead letters at mom, shop.")


ENOUGH = 2500
"""Of so many, some are left after one step of a decision."""
MANY = """
INSERT INTO saf.dead_letter
    (subscription_id, destination, shard, id, reason, error, to_service, body)
SELECT subscription_id, 'mom', 0, n, 'failed', 'no', 'billing', ''
FROM saf.subscription, generate_series(1, %s) AS n WHERE name = 'forwarder'
"""


def test_a_decision_that_is_interrupted_ends_with_its_step_and_says_what_is_done(
    config: Path, app: Dsn
) -> None:
    with connect(app) as connection, connect(app) as holder:
        connection.execute(MANY, [ENOUGH])
        with holder.transaction():
            # the second step waits for one of its rows
            holder.execute(
                "SELECT FROM saf.dead_letter WHERE dead_letter_id = "
                "(SELECT min(dead_letter_id) + 1000 FROM saf.dead_letter) FOR UPDATE"
            )
            process = subprocess.Popen(
                [BIN / "saf", "dead", "discard", "--all", "--yes", "--config", config],
                env=environment(),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            until(lambda: waiters(holder))
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline() == "saf: stopping after the messages in hand\n"
        out, err = process.communicate(timeout=60)
        ((left,),) = fetch(connection, "SELECT count(*) FROM saf.dead_letter")
    assert (process.returncode, left) == (130, 500)
    ids = re.fullmatch(
        r"shop: 2,000 dead letters discarded \((.*), …\)\n"
        r"  500 stay: the decision was stopped: decide again\n",
        out,
    )
    assert ids, out
    assert len({UUID(message_id) for message_id in ids[1].split(", ")}) == 3, "they have no keys"
    assert err == "saf: interrupted: changes not shown as done were not made\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dead", "discard"], "Give numbers, a filter, or --all"),
        (["dead", "list", "--reason", "boredom"], "the reasons are rejected, expired"),
        (["dead", "show", "7", "--broker", "shop"], "no dead letter 7"),
        (
            ["parked", "list", "--broker", "shp"],
            "in saf.toml (did you mean 'shop'?), only mom, shop",
        ),
    ],
)
def test_what_was_meant_is_asked_in_one_sentence(
    config: Path, arguments: list[str], said: str
) -> None:
    done = saf(*arguments, "--config", config)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_rebase_leaves_alone_what_was_not_restored(config: Path) -> None:
    done = saf("rebase", "--config", config)
    said = [f"{name}: was not restored, nothing to do\n" for name in ("mom", "shop")]
    assert (done.returncode, done.stdout) == (0, "".join(said))
    brokers = answer("rebase", "--force", config=config)["brokers"]
    assert brokers == [
        {
            "broker": name,
            "rows": 0,
            "destinations_ahead": [],
            "second_targets": 0,
            "why": [],
            "written_here": 0,
            "new_ids": 0,
            "doubled": 0,
            "purged_since": [],
        }
        for name in ("mom", "shop")
    ]


@pytest.mark.usefixtures("aside")
def test_parked_messages_are_listed_counted_discarded_and_redirected(
    config: Path, app: Dsn, mom: Dsn
) -> None:
    listed = answer("parked", "messages", "--destination", "other", config=config)["parked"]
    assert [(one["service"], one["key"], one["free"]) for one in listed] == [
        ("ship", "k", True)
    ] * 3
    first = str(listed[0]["parked_id"])
    shop = ("--broker", "shop")
    dry = answer("parked", "discard", first, "--dry-run", *shop, config=config)
    assert dry["parked"] == {"shop": {"messages": 1, "stay": 0, "why": {}}}
    assert dry["messages"] == listed[:1]
    dry_shown = saf("parked", "discard", first, "--dry-run", *shop, "--config", config).stdout
    assert " ship " in dry_shown.splitlines()[1]
    assert dry_shown.splitlines()[2] == "shop: 1 parked message"
    chosen = ("parked", "discard", first, "--why", "a test", *shop, "--config", config)
    done = saf(*chosen)
    assert (done.returncode, done.stdout) == (2, "")
    lost = "1 parked message at shop (k) would be lost"
    assert done.stderr == (
        f"saf: nothing is done yet: {lost}: add --yes, or --dry-run to list them\n"
    )
    done = saf(*chosen, "--yes")
    assert done.stdout == "shop: 1 parked message discarded (k)\n"
    done = saf("parked", "redirect", "--all", "--to", "mum", "--config", config)
    assert (done.returncode, "did you mean" in done.stderr) == (2, True)
    done = saf("parked", "redirect", "--to", "mom", "--config", config)
    assert (done.returncode, "or --all" in done.stderr) == (2, True)
    ids = answer("parked", "redirect", "--all", "--to", "mom", config=config)["message_ids"]
    assert ids == {"mom": [], "shop": [one["message_id"] for one in listed[1:]]}
    with Cycle(app, forwarding_rules(mom=mom, other=NOWHERE)) as cycle:
        cycle.run()
    assert bodies(mom) == ["y", "y", "y"]


@pytest.mark.usefixtures("aside")
def test_lists_and_decisions_concern_the_sources_and_the_stores(config: Path, mom: Dsn) -> None:
    with connect(mom) as store:
        store.execute("INSERT INTO saf.subscription (name, log) VALUES ('billing', 'inbox')")
        store.execute(
            "INSERT INTO saf.dead_letter "
            "(subscription_id, destination, shard, id, reason, error, to_service, key, body) "
            "SELECT subscription_id, '', 0, n, 'failed', 'no amount', 'billing', 'A-' || n, '' "
            "FROM saf.subscription, generate_series(1, 5) AS n WHERE name = 'billing'"
        )
    listed = answer("dead", "list", config=config)["dead_letters"]
    assert [one["broker"] for one in listed] == ["mom"] * 5 + ["shop"] * 2
    counts = saf("dead", "list", "--count", "--config", config).stdout
    assert counts == "mom: 5 dead letters\nshop: 2 dead letters\n"
    only = answer("dead", "list", "--broker", "shop", config=config)["dead_letters"]
    assert {one["broker"] for one in only} == {"shop"}
    none = saf("dead", "list", "--reason", "failed", "--broker", "shop", "--config", config)
    assert none.stdout == "No matching dead letters at shop.\n"
    done = saf("dead", "discard", "--reason", "failed", "--yes", "--config", config)
    assert done.stdout == "mom: 5 dead letters discarded (A-1, A-2, A-3, …)\n"
    done = saf("dead", "discard", "--reason", "failed", "--yes", "--config", config)
    assert done.stdout == "No matching dead letters at mom, shop. Nothing is discarded.\n"
    done = saf("dead", "redirect", "--all", "--to", "mom", "--config", config)
    assert done.stdout == "shop: 2 dead letters redirected to mom ([/])\n"


@pytest.mark.usefixtures("aside")
def test_discarding_asks_on_a_terminal_with_the_number_and_the_keys(config: Path) -> None:
    command = ("dead", "discard", "--all", "--config", str(config))
    said = on_a_terminal(*command, answer="n\n", columns=200)
    assert "Discard 2 dead letters at shop ([/])? [y/N]: " in said
    assert said.endswith("nothing is done")
    assert answer("dead", "list", "--count", config=config)["dead_letters"]["shop"] == 2
    said = on_a_terminal(*command, answer="y\n", columns=200)
    assert said.endswith("shop: 2 dead letters discarded ([/])")
    assert answer("dead", "list", "--count", config=config)["dead_letters"]["shop"] == 0
    said = on_a_terminal(*command, answer="y\n", columns=200)
    assert "Discard" not in said, "there is nothing to ask about"


@pytest.mark.usefixtures("aside")
def test_a_question_answered_with_no_ends_with_one(config: Path) -> None:
    terminal, stdin = os.openpty()
    os.write(terminal, b"n\n")
    command = ["saf", "dead", "discard", "--all", "--config", str(config)]
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        env=environment(),
        stdin=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(stdin)
    os.close(terminal)
    assert done.returncode == 1
    assert done.stderr.endswith("nothing is done\n")


@pytest.mark.usefixtures("aside")
@pytest.mark.parametrize("what", ["dead", "parked"])
def test_discarding_without_a_terminal_needs_yes_and_says_so(config: Path, what: str) -> None:
    before = answer("status", config=config)
    for json_ in ([], ["--json"]):
        done = saf(what, "discard", "--all", *json_, "--config", config)
        assert (done.returncode, done.stdout) == (2, "")
        count, key = {"dead": ("2 dead letters", "[/]"), "parked": ("3 parked messages", "k")}[what]
        lost = f"{count} at shop ({key}) would be lost: add --yes, or --dry-run to list them"
        assert lost in done.stderr
    after = answer("status", config=config)
    counts = [
        (one["parked"], one["dead_letters"]) for one in (*before["brokers"], *after["brokers"])
    ]
    assert counts == [(3, 2)] * 2
    assert saf(what, "discard", "--all", "--dry-run", "--config", config).returncode == 0


def test_only_what_was_counted_is_discarded(config: Path, app: Dsn) -> None:
    """Messages that become dead letters while the question is open stay."""
    with connect(app) as connection:
        connection.execute(MANY, [2])
        terminal, theirs = os.openpty()
        process = subprocess.Popen(
            [BIN / "saf", "dead", "discard", "--all", "--config", config],
            env=environment(),
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        asked = b""
        while b"[y/N]" not in asked:
            asked += os.read(process.stderr.fileno(), 1000)
        assert b"Discard 2 dead letters at shop (" in asked
        connection.execute(MANY.replace("generate_series(1, %s)", "generate_series(8, %s)"), [9])
        os.write(terminal, b"y\n")
        out, _ = process.communicate(timeout=60)
        os.close(theirs)
        os.close(terminal)
        assert out.strip().startswith(b"shop: 2 dead letters discarded (")
        assert fetch(connection, "SELECT id FROM saf.dead_letter ORDER BY id") == [(8,), (9,)]


WAITING = """
INSERT INTO saf.subscription (name, log) VALUES ('reader', 'inbox');
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, error)
SELECT subscription_id, destination, kind, subject, CASE WHEN name = 'reader' THEN 7 END, 'why'
FROM (VALUES ('forwarder', 'mom', 'main', ''), ('forwarder', 'mom', 'service', 'biling'),
             ('forwarder', '', 'route', 'ship'), ('forwarder', 'mom', 'found_route', 'ship'),
             ('forwarder', 'mom', 'retry', ''), ('forwarder', '', 'retry', ''),
             ('forwarder', 'mom', 'found_replay', ''), ('forwarder', 'mom', 'doubt', ''),
             ('reader', '', 'key', 'A-1'), ('reader', '', 'later', '7'))
     AS w (name, destination, kind, subject)
JOIN saf.subscription s USING (name) WHERE s.log = CASE name WHEN 'reader' THEN 'inbox'
                                                            ELSE 'outbox' END
"""


@pytest.mark.parametrize(
    ("waits_for", "texts"),
    [
        ("destination", ["destination 'mom'", "destination 'mom' (retry)"]),
        ("route", ["route (retry)", "route for service 'ship'"]),
        (
            "found-route",
            ["destination 'mom' (replay)", "service 'ship' at 'mom'"],
        ),
        ("service", ["service 'biling' at 'mom'"]),
        ("outcome", ["outcome at 'mom'"]),
        ("handler", ["next attempt for key 'A-1'"]),
        ("time", ["time for shard '7'"]),
        ("conversation", []),
    ],
)
def test_parked_messages_are_listed_by_what_they_wait_for(
    config: Path, app: Dsn, waits_for: str, texts: list[str]
) -> None:
    with connect(app) as connection:
        connection.execute(WAITING)
        found = parked(connection, lanes=Lanes(waits_for=waits_for)).shown
    assert sorted(str(lane.own) for lane in found) == texts
    assert {lane.waits_for for lane in found} <= {waits_for}
    rows = answer("parked", "list", "--waits-for", waits_for, config=config)["parked"]
    assert [row["waits_for"] for row in rows] == [waits_for] * len(texts)
    said = " ".join(saf("parked", "list", "--config", config).stdout.split())
    assert all(f" {lane.words} " in said for lane in found)
    due = answer("parked", "retry-now", "--waits-for", waits_for, config=config)["lanes"]
    assert due["shop"] == (0 if waits_for == "time" else len(texts))


def test_parked_messages_are_chosen_by_their_origin(config: Path, app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(WAITING)
    for origin, kinds in (("retry", ["retry", "retry"]), ("replay", ["found_replay"])):
        rows = answer("parked", "list", "--origin", origin, config=config)["parked"]
        assert [row["kind"] for row in rows] == kinds
        due = answer("parked", "retry-now", "--origin", origin, config=config)["lanes"]
        assert due["shop"] == len(kinds)
    assert answer("parked", "messages", "--origin", "retry", config=config)["parked"] == []


def test_what_parked_messages_cannot_wait_for_is_refused_with_the_words(config: Path) -> None:
    done = saf("parked", "list", "--waits-for", "godot", "--config", config)
    assert done.returncode == 2
    assert "'handler'" in done.stderr
