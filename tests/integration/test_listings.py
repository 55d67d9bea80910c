"""What commands list can be read and copied from a terminal of 80 columns, and from a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from saf.broker.services import create_service, create_subscription
from saf.cli import app as app_of_saf
from saf.database import Dsn
from saf.dialogs.contracts import create_contract, create_message_type
from saf.receiving.dispatch.stored import add
from saf.routing.routers import add_router
from saf.routing.routes import add_route, add_topic
from tests.pipeline import connect, forward, send
from tests.programs import ROOT, configuration, saf
from tests.terminals import on_a_terminal

COLUMNS = 80
CONTRACT = "https://contracts.example.com/warehouse/goods-issue/with-serial-numbers"
SERVICE = "https://services.example.com/warehouse/goods-issue"
HANDLE = "0a1b2c3d-0a1b-4a1b-8a1b-0a1b2c3d4e5f"
SUBSCRIPTION = "everything-for-the-warehouse/goods-issue/with-serial-numbers"
DESTINATIONS = [f"warehouse-of-the-north-{number}" for number in range(6)]
ROLE = "https://roles.example.com/warehouse/goods-issue"
NIGHTLY = "the-nightly-count-of-the-warehouse"
CAPTURED = "orders_of_the_second_hall_since_2031"
WHERE = "placed_at < '2031-01-01' AND hall = 'second'"
NAME = "remind-of-the-goods-issue/4711/2031-000000815"
KEY = "customer/4711/order/2031-000000815"
ENDPOINT = "the-warehouse-of-a-partner"
URL = "https://partner.example.com/warehouse/goods-issue"
ERROR = (
    "mom rejects messages: the value of the third column violates what its table says of it, "
    "which a person in the warehouse has to decide about before it is sent again"
)


@pytest.fixture(scope="module")
def config(shared_broker: Callable[[str], Dsn], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Brokers with long names, a dialog that has failed, and messages that wait or are dead."""
    app, mom = shared_broker("app"), shared_broker("mom")
    for dsn in (app, mom):
        with connect(dsn) as connection:
            create_message_type(connection, "https://contracts.example.com/warehouse/goods")
            create_contract(
                connection,
                CONTRACT,
                {"https://contracts.example.com/warehouse/goods": "initiator"},
            )
            create_service(connection, SERVICE)
    with connect(app) as connection:
        add_route(connection, "mom", service=SERVICE, comment="since the move to the new hall")
        add_router(connection, f"{SERVICE}/router", "sql", "get_json_object(text, '$.hall')")
        connection.execute(
            "WITH g AS (INSERT INTO saf.conversation_group DEFAULT VALUES RETURNING group_id) "
            "INSERT INTO saf.conversation (handle, conversation_id, is_initiator, service, "
            "far_service, group_id, send_sequence, error_code, error_text) "
            "SELECT %s, gen_random_uuid(), true, %s, %s, group_id, 1, 17, %s FROM g",
            (HANDLE, SERVICE, SERVICE, ERROR),
        )
        connection.execute(
            "INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, to_service, "
            "key, body, reason, error) VALUES (1, 'mom', 1, 1, %s, %s, 'x', 'rejected', %s)",
            (SERVICE, KEY, ERROR),
        )
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) SELECT %s, %s, '' "
            "FROM generate_series(1, 2)",
            (SERVICE, KEY),
        )
        send(connection, "x")
        add_topic(connection, f"{SERVICE}/prices")
        connection.execute(
            "INSERT INTO saf.sender (role, from_service) VALUES (%s, %s)", (ROLE, SERVICE)
        )
        for destination in DESTINATIONS:
            add_route(connection, destination, service=f"{SERVICE}/prices")
        connection.execute(
            "INSERT INTO saf.dropped (subscription_id, shard, reason, messages, last_message_id) "
            "VALUES (1, 1, 'repeat', 631544, %s)",
            [HANDLE],
        )
        connection.execute(
            "INSERT INTO saf.held (to_service, key, name, body, due, once_for, sender, refused) "
            "VALUES (%s, %s, %s, '', now() - interval '1 h', '0', %s, %s)",
            (SERVICE, KEY, NAME, ROLE, ERROR),
        )
        connection.execute(
            "INSERT INTO saf.schedule (name, to_service, key, body, cron, zone, anchor, missed, "
            "next_run, sender) VALUES (%s, %s, %s, '', '0 2 * * *', 'Europe/Berlin', now(), 'one', "
            "now() + interval '1 h', %s)",
            (NIGHTLY, SERVICE, KEY, ROLE),
        )
        connection.execute(
            "WITH c AS (INSERT INTO saf.capture (schema_name, table_name, to_service, "
            "message_type, key, columns, primary_key, function_name, digest) "
            "VALUES ('a_schema_of_the_application', %s, %s, 'x', 'k', '{k}', '{k}', 'f', '') "
            "RETURNING capture_id) INSERT INTO saf.backfill (capture_id, condition, chunk_rows) "
            "SELECT capture_id, %s, 1 FROM c",
            (CAPTURED, SERVICE, WHERE),
        )
        connection.execute(
            "INSERT INTO saf.audit (action, message_ids, why) "
            "VALUES ('discard', ARRAY[%s::uuid], %s)",
            [HANDLE, ERROR],
        )
    forward(app, mom=mom)
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES (%s, '')", (SERVICE,))
    with connect(mom) as connection:
        create_subscription(connection, SUBSCRIPTION, service=SERVICE)
        add(connection, ENDPOINT, URL, subscription=SUBSCRIPTION, settings={})
        connection.execute("DELETE FROM saf.inbox WHERE id = 1")
    file = tmp_path_factory.mktemp("listings") / "saf.toml"
    return configuration(file, {"app": app}, {"mom": mom})


NOWHERE = Dsn("host=/nonexistent dbname=none")
LONG = 20
"""From so many characters on, a word is a name, a handle, a date or an id."""
FOUND = {("reconcile", 1), ("doctor", 1)}
"""The exit codes of commands that have found something."""

WHOLE = {
    ("held", "list"): [SERVICE, KEY, NAME, ROLE, "refused", "mom rejects messages"],
    ("capture", "list"): [CAPTURED, SERVICE, "does not exist"],
    ("backfill", "list"): [CAPTURED, "open", WHERE],
    ("schedule", "list"): [NIGHTLY, SERVICE, "0 2 * * *", "Europe/Berlin"],
    ("dialog", "list"): [HANDLE, SERVICE, "17: mom rejects messages"],
    ("dead", "list"): [SERVICE, KEY, "rejected", "mom rejects messages"],
    ("dead", "groups"): [SERVICE, KEY, "rejected", "mom rejects messages"],
    ("dead", "audit"): ["discard", "mom rejects messages"],
    ("contract", "list"): [CONTRACT, "initiator"],
    ("parked", "list"): ["billing", "has no service"],
    ("parked", "groups"): ["billing", "service", "has no service"],
    ("route", "list"): [SERVICE, "since the move to the new hall"],
    ("route", "explain", SERVICE): [SERVICE, "yes"],
    ("topic", "list"): [f"{SERVICE}/prices", *DESTINATIONS],
    ("router", "list"): [f"{SERVICE}/router", "get_json_object(text, '$.hall')"],
    ("service", "list"): [SERVICE],
    ("sender", "list"): [ROLE, SERVICE, "any"],
    ("subscription", "list"): [SUBSCRIPTION, SERVICE],
    ("status",): ["dead letters", "no running forwarder owns shards 0-63", "631,544", HANDLE],
    ("status", "--shards"): ["lag", "no running forwarder owns shards 0-63"],
    ("inbox", "status"): [SERVICE],
    ("endpoint", "list"): [ENDPOINT, SUBSCRIPTION, URL, "up"],
    ("inbox", "peek", SERVICE): [SERVICE, KEY],
    ("purge", "--dry-run"): ["outbox", "in use: new messages go here"],
    ("reconcile",): ["lost", SERVICE, KEY],
    ("doctor",): ["checks:", "fix:"],
    ("members",): [SUBSCRIPTION, "no members, and no receiver is connected"],
    ("broker", "list"): ["mom", "destination", "64"],
    ("outbox", "list"): [SERVICE, KEY, "forwarded"],
    ("outbox", "show", "1", "--broker", "app"): [SERVICE, KEY, "rejected"],
    ("forward", "--explain"): [SERVICE, "has no service"],
}
SEVERAL_TABLES = {
    *(("status",), ("status", "--shards"), ("reconcile",), ("doctor",)),
    *(("outbox", "show", "1", "--broker", "app"), ("forward", "--explain")),
}
"""Commands that show more than one table, or none."""
LISTING = {"list", "groups", "status", "audit", "peek", "explain", "reconcile", "doctor", "purge"}
"""The names of commands that list something."""


def test_each_command_that_lists_something_is_tried_here() -> None:
    def commands(click: Any, *names: str) -> Iterator[tuple[str, ...]]:
        if not hasattr(click, "commands"):
            yield names
        for name, one in getattr(click, "commands", {}).items():
            yield from commands(one, *names, name)

    listing = {one for one in commands(get_command(app_of_saf)) if one[-1] in LISTING}
    tried = {one[:2] if len(one) > 1 and one[1][0] != "-" else one[:1] for one in WHOLE}
    # the first starts Spark, and shows a route's explanation; the others have tests of their own
    assert listing - tried == {("router", "explain"), ("fleet", "list"), ("source", "list")}


def test_members_of_a_fleet_are_shown_whole_on_a_terminal_of_80_columns(
    mom: Dsn, tmp_path: Path
) -> None:
    file = configuration(tmp_path / "saf.toml", {}, {"mom": mom})
    fleet = f"[fleets.warehouses]\ndsn = {json.dumps(mom.conninfo)}\ndatabases = 'none_*'\n"
    file.write_text(fleet + file.read_text())
    member = f"warehouses/{SERVICE.rpartition('/')[2]}_of_the_second_customer_of_the_year_2031"
    with connect(mom) as connection:
        connection.execute(
            "INSERT INTO saf.fleet_member (fleet, name, broker_id, missing_since) "
            "VALUES ('warehouses', %s, %s, '2031-02-03')",
            [member, HANDLE],
        )
    said = on_a_terminal("fleet", "list", "--config", str(file), columns=COLUMNS)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert "\u2026" not in plain
    for text in (member, HANDLE, "2031-02-03"):
        assert text in " ".join(plain.split())
    (row,) = json.loads(saf("fleet", "list", "--json", "--config", file).stdout)["members"]
    assert (row["member"], row["broker_id"]) == (member, HANDLE)
    assert row["missing_since"].startswith("2031-02-03")


def test_sources_are_shown_whole_on_a_terminal_of_80_columns(mom: Dsn, tmp_path: Path) -> None:
    file = configuration(tmp_path / "saf.toml", {}, {"mom": mom})
    topic = f"{SERVICE}/payments"
    settings = {
        "kind": "redis",
        "server": "redis://127.0.0.1:1",
        "topic": topic,
        "service": SERVICE,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    file.write_text("\n".join([file.read_text(), "[sources.payments]", *lines, ""]))
    with connect(mom) as connection:
        create_service(connection, SERVICE)
        connection.execute(
            "WITH s AS (INSERT INTO saf.source (name, kind, topic) VALUES ('payments', 'redis', %s)"
            " RETURNING source) INSERT INTO saf.source_shard (source, shard, start_batch, "
            "start_position, added, pending, looked_at) "
            "SELECT source, 0, 1767225600000, 7, 631544, 12345, now() FROM s",
            [topic],
        )
    said = on_a_terminal("source", "list", "--config", str(file), columns=COLUMNS)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert "\u2026" not in plain
    for text in (topic, SERVICE, "12,345", "no running forwarder reads it"):
        assert text in " ".join(plain.split())
    for line in plain.splitlines():
        assert len(line) <= COLUMNS or len(line.split()) <= 2, line


def test_no_command_has_another_kind_of_table() -> None:
    """Tables of rich cut what does not fit."""
    for file in (ROOT / "saf" / "cli").glob("*.py"):
        assert "rich.table" not in file.read_text(), file.name


@pytest.mark.parametrize("command", WHOLE, ids=" ".join)
def test_a_terminal_of_80_columns_shows_what_a_pipe_gets_and_breaks_lines_at_spaces_only(
    config: Path, command: tuple[str, ...]
) -> None:
    said = on_a_terminal(*command, "--config", str(config), columns=COLUMNS)
    assert "\u2026" not in said, "nothing is cut"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    words = " ".join(plain.split())
    for text in WHOLE[command]:
        assert text in words, said
    lines = [line.strip() for line in plain.splitlines()]
    for line in plain.splitlines():
        assert len(line) <= COLUMNS or len(line.split()) <= 2, f"more than a name: {line}"
    if ERROR[-20:] in " ".join(lines):
        # three or four lines, and not one for each word
        assert len([line for line in lines if line and line in ERROR]) <= 4, said
    for word in saf(*command, "--config", config).stdout.split():
        if len(word) >= LONG or re.fullmatch(r"[\d,]*,\d{3}", word):
            assert word in words, f"{word} is broken or cut: {said}"


@pytest.mark.parametrize("command", WHOLE, ids=" ".join)
def test_in_a_pipe_each_row_is_one_line_and_nothing_is_cut(
    config: Path, command: tuple[str, ...]
) -> None:
    done = saf(*command, "--config", config)
    assert done.returncode == 0 or (command[0], done.returncode) in FOUND, done.stderr
    assert "\u2026" not in done.stdout
    lines = done.stdout.splitlines()
    for texts in (
        [WHOLE[command]] if command not in SEVERAL_TABLES else [[one] for one in WHOLE[command]]
    ):
        assert any(all(text in line for text in texts) for line in lines), done.stdout
    if command in {("dialog", "list"), ("dead", "list"), ("dead", "groups"), ("dead", "audit")}:
        assert lines[-1].endswith(ERROR)


OF_STORES = "Stores are asked only with --broker: mom."


@pytest.mark.parametrize(
    ("command", "nothing"),
    [
        ("route list", f"No routes at app. {OF_STORES}"),
        ("route list --broker mom", "No routes at mom."),
        ("topic list", f"No topics at app. {OF_STORES}"),
        ("router list", f"No routers at app. {OF_STORES}"),
        ("sender list", "No rules for senders at mom, app."),
        ("contract list", "No contracts at mom, app."),
        ("service list", "No services at mom, app."),
        ("subscription list", "No subscriptions at mom, app."),
        ("parked list", "No parked messages at mom, app."),
        ("parked messages", "No parked messages at mom, app."),
        ("parked messages --key A-1", "No matching parked messages at mom, app."),
        ("parked list --waits-for route", "No matching parked messages at mom, app."),
        ("parked groups", "No failure groups of parked messages at mom, app."),
        ("dead list", "No dead letters at mom, app."),
        ("dead list --broker app", "No dead letters at app."),
        ("dead list --reason failed", "No matching dead letters at mom, app."),
        ("dead groups", "No dead letters at mom, app."),
        ("dead groups --reason failed", "No matching dead letters at mom, app."),
        ("dead audit", "No decisions at mom, app."),
        ("dialog list", "No conversations at mom, app."),
        ("dialog list --state error", "No matching conversations at mom, app."),
        ("outbox list", "No messages in the outbox at mom, app."),
        ("outbox list --sources", "No messages in the outbox at app."),
        ("outbox list --key A-1", "No matching messages in the outbox at mom, app."),
        ("inbox status", "No subscriptions at mom, app."),
        ("endpoint list", "No endpoints in saf.toml or at mom."),
        ("fleet list", "No known members of fleets."),
    ],
)
def test_an_empty_list_says_where_it_looked(
    tmp_path: Path, app: Dsn, mom: Dsn, command: str, nothing: str
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    config.write_text(config.read_text().replace('default_destination = "mom"', ""))
    done = saf(*command.split(), "--config", config)
    assert (done.returncode, done.stdout) == (0, f"{nothing}\n")


def test_status_says_which_stores_it_does_not_show_and_what_shows_them(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom, "own": app})
    said = "Not shown: mom. `saf inbox status` shows the stores."
    assert saf("status", "--config", config).stdout.splitlines()[-1] == said
    for broker in ("app", "mom"):
        assert "Not shown" not in saf("status", "--config", config, "--broker", broker).stdout


def test_a_list_of_brokers_that_do_not_answer_says_nothing_of_what_they_have(
    tmp_path: Path, app: Dsn
) -> None:
    config = configuration(tmp_path / "saf.toml", {"gone": NOWHERE}, {"mom": NOWHERE})
    done = saf("dead", "list", "--config", config)
    assert (done.returncode, done.stdout) == (75, "")
    config = configuration(tmp_path / "half.toml", {"app": app}, {"mom": NOWHERE})
    done = saf("dead", "list", "--config", config)
    assert (done.returncode, done.stdout) == (75, "No dead letters at app.\n")
    assert "saf: broker 'mom': " in done.stderr


def test_an_error_breaks_lines_at_spaces_only(config: Path) -> None:
    said = on_a_terminal(
        *("service", "create", "billing", "--broker", "nowhere", "--config", str(config)),
        columns=40,
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines()
    assert lines[0].startswith("saf: --broker nowhere: no")
    assert all(len(line) <= 40 for line in lines)
    assert "no [brokers.nowhere] and no [destinations.nowhere] in saf.toml" in " ".join(
        " ".join(lines).split()
    )
