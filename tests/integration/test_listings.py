"""What commands list can be read and copied from a terminal of 80 columns, and from a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from saf.broker.services import create_service
from saf.database import Dsn
from saf.dialogs.contracts import create_contract, create_message_type
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from tests.pipeline import connect, forward, send
from tests.programs import configuration, saf
from tests.terminals import on_a_terminal

COLUMNS = 80
CONTRACT = "https://contracts.example.com/warehouse/goods-issue/with-serial-numbers"
SERVICE = "https://services.example.com/warehouse/goods-issue"
HANDLE = "0a1b2c3d-0a1b-4a1b-8a1b-0a1b2c3d4e5f"
KEY = "customer/4711/order/2031-000000815"
ERROR = (
    "mom rejects messages: the value of the third column violates what its table says of it, "
    "which a person in the warehouse has to decide about before it is sent again"
)


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Brokers with long names, a dialog that has failed, and messages that wait or are dead."""
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
        send(connection, "x")
    forward(app)
    return configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})


WHOLE = {
    ("dialog", "list"): [HANDLE, SERVICE, "17: mom rejects messages"],
    ("dead", "list"): [SERVICE, KEY, "rejected", "mom rejects messages"],
    ("contract", "list"): [CONTRACT, "initiator"],
    ("parked", "list"): ["billing", "no route for service"],
    ("route", "list"): [SERVICE, "since the move to the new hall"],
    ("router", "list"): [SERVICE, "get_json_object(text, '$.hall')"],
    ("service", "list"): [SERVICE],
    ("status",): ["dead letters", "nobody: 64 (0-63)"],
    ("inbox", "status"): [SERVICE],
}


@pytest.mark.parametrize("command", WHOLE, ids=" ".join)
def test_a_terminal_of_80_columns_shows_names_and_handles_whole_and_errors_in_lines(
    config: Path, command: tuple[str, ...]
) -> None:
    said = on_a_terminal(*command, "--config", str(config), columns=COLUMNS)
    assert "\u2026" not in said, "nothing is cut"
    for text in WHOLE[command]:
        assert text in said, said
    lines = [line.strip() for line in said.splitlines()]
    if ERROR[-20:] in " ".join(lines):
        # three or four lines, and not one for each word
        assert len([line for line in lines if line and line in ERROR]) <= 4, said


@pytest.mark.parametrize("command", WHOLE, ids=" ".join)
def test_in_a_pipe_each_row_is_one_line_and_nothing_is_cut(
    config: Path, command: tuple[str, ...]
) -> None:
    done = saf(*command, "--config", config)
    assert done.returncode == 0, done.stderr
    assert "\u2026" not in done.stdout
    lines = done.stdout.splitlines()
    for texts in (WHOLE[command],) if command != ("status",) else ():
        assert any(all(text in line for text in texts) for line in lines), done.stdout
    if command in {("dialog", "list"), ("dead", "list")}:
        assert lines[-1].endswith(ERROR)
