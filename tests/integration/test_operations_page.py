"""The commands of docs/operations.md that need roles, or purge."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from saf import Outbox
from saf.database import Dsn, fetch
from saf.setaside.failure_groups import failure_groups
from saf.setaside.selection import DeadLetters, ParkedMessages
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import connect, forward
from tests.programs import send

pytestmark = pytest.mark.full


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


def test_the_commands_of_the_operations_page_make_roles(folder: Path, app: Dsn, mom: Dsn) -> None:
    (script,) = blocks(page("operations.md"), "roles")
    mine = {name: f"{name}_{app.database}" for name in ("shop_app", "saf_forward")}
    for name, own in mine.items():
        script = re.sub(rf"\b{name}\b", own, script)
    with connect(app) as connection:
        connection.execute(f"CREATE ROLE {mine['saf_forward']}")
        try:
            said = shell(f"export SAF_DSN=$SHOP_DSN\n{script}", folder, app, mom)
        finally:
            for own in mine.values():
                connection.execute(f"DROP OWNED BY {own}")
                connection.execute(f"DROP ROLE {own}")
    assert mine["saf_forward"] in said


def test_the_commands_of_the_operations_page_look(folder: Path, app: Dsn, mom: Dsn) -> None:
    (script,) = blocks(page("operations.md"), "views")
    send(app, 2)
    said = shell(script, folder, app, mom)
    assert "the default destination" in said
    assert "no running process owns shards 0-63" in said
    assert "pending" in said


def test_the_commands_of_the_operations_page_purge(folder: Path, app: Dsn, mom: Dsn) -> None:
    (script,) = blocks(page("operations.md"), "purge")
    send(app, 2)
    forward(app, mom=mom)
    said = shell(script.replace("/srv/", f"{folder}/"), folder, app, mom)
    assert '"broker": "shop"' in said


def test_the_commands_of_the_operations_page_decide_about_held_messages(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    (script,) = blocks(page("operations.md"), "held")
    later = datetime.now(UTC) + timedelta(days=1)
    outbox = Outbox()
    with app.connect(role="test") as connection:
        for name in ("remind-42", "remind-43", "refused"):
            outbox.send(connection, "billing", name, name=name, deliver_at=later)
        connection.execute("UPDATE saf.held SET refused = 'no' WHERE name = 'refused'")
    said = shell(script, folder, app, mom)
    assert "No matching held messages at mom, shop." in said
    assert "shop: 1 held message cancelled (remind-43)" in said
    assert "shop: 'remind-42' to 'billing' is held until" in said
    with connect(app) as connection:
        rows = fetch(connection, "SELECT name, due, refused FROM saf.held ORDER BY name")
        assert [(name, refused) for name, _, refused in rows] == [
            ("refused", None),
            ("remind-42", None),
        ]
        assert rows[1][1] < later


GROUPS = """
INSERT INTO saf.dead_letter (subscription_id, shard, id, reason, error, to_service, key, body)
SELECT subscription_id, 1, n, 'rejected', 'no price in order ' || n, 'billing', n, ''
FROM saf.subscription, generate_series(1, 3) AS n WHERE name = 'forwarder';
INSERT INTO saf.backoff (subscription_id, destination, kind, attempts, error, next_attempt_at)
SELECT subscription_id, 'mom', 'main', 1, 'it is down', now() + interval '1 h'
FROM saf.subscription WHERE name = 'forwarder';
INSERT INTO saf.parked (subscription_id, destination, shard, id, batch, position, to_service, body)
SELECT subscription_id, 'mom', 1, 1, 1, 1, 'billing', ''
FROM saf.subscription WHERE name = 'forwarder'
"""


def test_the_commands_of_the_operations_page_decide_about_a_group(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    (script,) = blocks(page("operations.md"), "groups")
    dead_id, parked_id = dict.fromkeys(re.findall(r"--group (\w+)", script))
    with connect(app) as connection:
        connection.execute(GROUPS)
        for kind, shown in ((DeadLetters, dead_id), (ParkedMessages, parked_id)):
            (group,) = failure_groups(connection, kind()).shown
            script = script.replace(shown, group.group)
        said = shell(script, folder, app, mom)
        assert "no price in order 3" in said
        assert fetch(connection, "SELECT count(*) FROM saf.dead_letter") == [(0,)]
        due = "SELECT count(*) FROM saf.backoff WHERE next_attempt_at <= now()"
        assert fetch(connection, due) == [(2,)], "the retried messages, and the group"
