"""docs/upgrading.md: the order of its steps loses nothing, and its commands work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.script import ScriptDirectory

import saf
from saf.broker.migrate import config, migrate
from saf.database import Dsn, queries
from saf.errors import SchemaMismatch
from tests.earlier import put_back
from tests.pages import blocks, page, prepared, shell
from tests.pipeline import Cycle, connect, drain, forwarding_rules
from tests.programs import received, send
from tests.waits import until

pytestmark = pytest.mark.full


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    return prepared(tmp_path, app, mom)


@pytest.fixture
def role(app: Dsn) -> Iterator[str]:
    name = f"forward_{app.database}"
    with connect(app) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    with connect(app) as connection:
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


@pytest.mark.slow
def test_the_commands_of_the_upgrading_page_work_as_they_stand(
    folder: Path, app: Dsn, mom: Dsn, role: str
) -> None:
    text = page("upgrading.md")
    script = "".join(blocks(text, "shell") + blocks(text, "many"))
    send(app, 2)
    try:
        said = shell(script.replace("saf_forward", role), folder, app, mom)
    finally:
        with connect(mom) as connection:
            connection.execute(f"DROP OWNED BY {role}")
    assert "forwarded 2 " in said


def migrate_to_the_revision_before(dsn: Dsn) -> str:
    """Give a database the schema of the revision before the newest one, and return its name."""
    migrate(dsn)
    before = ScriptDirectory.from_config(config(dsn)).get_revision("head").down_revision
    if isinstance(before, str):
        command.downgrade(config(dsn), before)
        return before
    return put_back(dsn)


@pytest.mark.slow
def test_writers_of_the_old_package_go_on_while_the_schema_is_migrated(
    new_database: Any, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = new_database("old")
    before = migrate_to_the_revision_before(app)
    with connect(app) as connection:
        connection.execute("CREATE TABLE counted (writer int, number int)")
    stop, sent, failed = threading.Event(), [0] * 3, list[BaseException]()
    began = threading.Barrier(len(sent) + 1)

    def write(writer: int) -> None:
        outbox = saf.Outbox()  # a process of its own has one of its own
        try:
            with psycopg.connect(app.conninfo) as connection:
                for number in range(1_000_000):
                    if stop.is_set():
                        break
                    with connection.transaction():
                        connection.execute("INSERT INTO counted VALUES (%s, %s)", [writer, number])
                        outbox.send(connection, "billing", str(number), key=f"writer {writer}")
                    sent[writer] += 1
                    if number == 0:
                        began.wait()
        except BaseException as error:
            failed.append(error)
            began.abort()

    writers = [threading.Thread(target=write, args=[one]) for one in range(len(sent))]
    with monkeypatch.context() as old:
        old.setattr(queries, "REVISION", before)
        for one in writers:
            one.start()
        began.wait(60)  # all have sent once, by the old package
    try:
        migrate(app)
        after = list(sent)
        until(lambda: failed or all(n > m + 10 for n, m in zip(sent, after, strict=True)))
    finally:
        stop.set()
        for one in writers:
            one.join()
    assert failed == []

    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        drain(cycle)
    arrived = received(mom)
    for writer, count in enumerate(sent):
        numbers = [body for key, body in arrived if key == f"writer {writer}"]
        assert numbers == [str(number) for number in range(count)], "in order, once, all of them"


def test_who_starts_between_the_steps_of_an_upgrade_sends_or_is_told_what_to_do(
    new_database: Any, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = new_database("old")
    before = migrate_to_the_revision_before(old)
    outbox = saf.Outbox(allow_autocommit=True)
    with connect(old) as connection, pytest.raises(SchemaMismatch, match="run `saf migrate"):
        outbox.send(connection, "billing", "")
    monkeypatch.setattr(queries, "REVISION", before)
    with connect(app) as connection:
        outbox.send(connection, "billing", "")
        with pytest.raises(SchemaMismatch, match="upgrade the saf-outbox package"):
            queries.check_schema(connection)
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")
