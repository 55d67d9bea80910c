"""The commands and statements of the how-to pages do what the pages say."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from alembic.script import ScriptDirectory

import saf
from saf.broker.grants import Kind
from saf.broker.migrate import config, migrate
from saf.broker.services import create_service
from saf.database import Dsn, fetch, revision
from saf.errors import SchemaMismatch
from tests.pages import blocks, page, unmarked_shells
from tests.pipeline import Cycle, connect, drain, forward, forwarding_rules
from tests.programs import BIN, ROOT, configuration, received, run, send
from tests.waits import until

ORDERS = "CREATE TABLE orders (number text PRIMARY KEY, total int)"
INVOICE = "CREATE TABLE invoice (number text PRIMARY KEY, total int)"


@pytest.fixture
def folder(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    """Where saf.toml is."""
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    with connect(mom) as store:
        create_service(store, "billing")
    return tmp_path


def shell(script: str, folder: Path, app: Dsn, mom: Dsn) -> str:
    """What bash says."""
    done = run(
        ["bash", "-euxo", "pipefail", "-c", script],
        env={
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
            "SHOP_DSN": app.conninfo,
            "MOM_DSN": mom.conninfo,
        },
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / "docs").rglob("*.md"),
]
TOO_MUCH = re.compile(r"(make|pip install|git clone|python -m benchmarks\.peers) ")
"""What takes minutes, or the network; other tests have parts of it."""


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_no_command_of_a_page_is_left_out(file: Path) -> None:
    for block in unmarked_shells(file.read_text()):
        for line in block.splitlines():
            assert TOO_MUCH.match(line) or line.startswith("saf migrate "), line
            if line.startswith("make "):
                done = run(["make", "-n", *line.partition("#")[0].split()[1:]], cwd=ROOT)
                assert done.returncode == 0, done.stderr


# operations


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


def test_the_commands_of_the_operations_page_purge(folder: Path, app: Dsn, mom: Dsn) -> None:
    (script,) = blocks(page("operations.md"), "purge")
    send(app, 2)
    forward(app, mom=mom)
    said = shell(script.replace("/srv/saf-archive", "archive"), folder, app, mom)
    assert '"broker": "shop"' in said


# security


def test_the_commands_of_the_security_page_work_as_they_stand(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    script = "".join(blocks(page("security.md"), "shell"))
    # roles are the server's, which other tests share
    mine = {name: f"{name}_{app.database}" for name in ("shop_app", "saf_forward")}
    for name, own in mine.items():
        script = re.sub(rf"\b{name}\b", own, script)
    said = shell(script, folder, app, mom)
    assert "GRANT INSERT" in said  # by --dry-run


def test_the_page_of_security_has_every_kind_of_role() -> None:
    for kind in Kind:
        assert f"| `{kind}` |" in page("security.md")


# monitoring


def test_the_figures_to_watch_are_there_and_right(folder: Path, app: Dsn, mom: Dsn) -> None:
    send(app, 3)
    forward(app, mom=mom)
    send(app, 2)
    script = "".join(blocks(page("monitoring.md"), "shell"))
    shell(script, folder, app, mom)
    sources = (folder / "saf-status.prom").read_text()
    assert 'saf_pending{broker="shop"} 2\n' in sources
    assert re.search(r'saf_oldest_pending_seconds\{broker="shop"\} \d', sources)
    stores = (folder / "saf-inbox.prom").read_text()
    assert 'saf_unread{broker="mom",subscription="billing"} 3\n' in stores


def test_the_alerts_are_on_figures_that_the_page_writes() -> None:
    groups = yaml.safe_load((ROOT / "examples" / "production" / "alerts.yaml").read_text())[
        "groups"
    ]
    rules = [rule for group in groups for rule in group["rules"]]
    written = set(
        re.findall(r"print\(\"(saf_\w+)%s", "".join(blocks(page("monitoring.md"), "shell")))
    )
    assert len(rules) == len({rule["alert"] for rule in rules})
    watched = {name for rule in rules for name in re.findall(r"\bsaf_\w+", rule["expr"])}
    assert watched <= written
    assert all({"summary", "do"} <= rule["annotations"].keys() for rule in rules)


@pytest.mark.slow
def test_a_run_says_of_itself_what_the_page_says(folder: Path, app: Dsn, mom: Dsn) -> None:
    send(app, 2)
    (script,) = blocks(page("monitoring.md"), "run")
    figures, problems = shell(script, folder, app, mom).splitlines()
    assert figures.startswith("2 0 0 0 ")
    assert problems == "0 [] 0"


def test_the_statements_to_watch_by_work_for_an_operator(app: Dsn) -> None:
    send(app, 2)
    (text,) = blocks(page("monitoring.md"), "sql")
    role = f"watcher_{app.database}"
    with connect(app) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN")
        try:
            run([BIN / "saf", "grant", "--role", "operator", role], env={"SAF_DSN": app.conninfo})
            with psycopg.connect(app.conninfo, user=role, autocommit=True) as connection:
                for statement in filter(None, text.split(";\n")):
                    connection.execute(statement.encode()).fetchall()
        finally:
            owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_every_event_that_the_page_names_is_one_that_is_logged() -> None:
    section = page("monitoring.md").split("| event | means |")[1].split("\n## ")[0]
    for event in re.findall(r"`([a-z_]+)`", section.split("\n\n")[0]):
        assert f'"{event}"' in SOURCE, event


# troubleshooting


def test_the_commands_of_the_troubleshooting_page_work_as_they_stand(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    script = "".join(blocks(page("troubleshooting.md"), "shell"))
    send(app, 1)
    forward(app, mom=mom)
    said = shell(script, folder, app, mom)
    assert "to mom" in said or "mom" in said


SOURCE = "\n".join(file.read_text() for file in sorted((ROOT / "saf").rglob("*.py")))
SAID = re.sub(r'"\s*\n?\s*f?"', "", SOURCE)
"""The source with texts that are written in parts put together."""

POSTGRESQLS = ("permission denied", "canceling statement due to lock timeout")
"""What the server says."""


@pytest.mark.parametrize("name", ["troubleshooting", "operations"])
def test_every_text_that_a_page_quotes_is_one_that_saf_says(name: str) -> None:
    rows = [line.split("|")[1] for line in page(f"{name}.md").splitlines() if line[:1] == "|"]
    quoted = [one for row in rows for one in re.findall(r'"([^"]+)"', row)]
    assert quoted
    for text in quoted:
        for part in re.split(r"\s*…\s*|\d+|: |'\w+'", text):
            said = part.strip(" .,;:`")
            if len(said) > 5 and not said.startswith(POSTGRESQLS):
                assert said in SAID, f"{text!r}: saf does not say {said!r}"


# upgrading


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


def test_a_migration_is_undone_and_made_again_as_the_upgrading_page_says(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    (script,) = blocks(page("upgrading.md"), "back")
    send(app, 1)
    shell(script, ROOT, app, mom)
    forward(app, mom=mom)
    assert len(received(mom)) == 1


def before(newest: str) -> str:
    """The revision that the newest one follows."""
    script = ScriptDirectory.from_config(config(Dsn("dbname=none"))).get_revision(newest)
    assert isinstance(script.down_revision, str)
    return script.down_revision


@pytest.mark.slow
def test_writers_of_the_old_package_go_on_while_the_schema_is_migrated(
    new_database: Any, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = new_database("old")
    newest = revision.REVISION
    migrate(app, revision=before(newest))
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
        old.setattr(revision, "REVISION", before(newest))
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


def test_who_starts_between_the_steps_of_an_upgrade_is_told_what_to_do(
    new_database: Any, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = revision.REVISION
    old = new_database("old")
    migrate(old, revision=before(newest))
    with connect(old) as connection, pytest.raises(SchemaMismatch, match="run `saf migrate"):
        saf.Outbox(allow_autocommit=True).send(connection, "billing", "")
    monkeypatch.setattr(revision, "REVISION", before(newest))
    with connect(app) as connection:
        with pytest.raises(SchemaMismatch, match="upgrade the saf-outbox package"):
            saf.Outbox(allow_autocommit=True).send(connection, "billing", "")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '')")


# coming from something else


def test_both_ways_are_written_and_what_both_have_is_handled_once(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    text = page("coming-from.md")
    with connect(app) as shop, connect(mom) as store:
        shop.execute(ORDERS)
        shop.execute("CREATE TABLE old_outbox (id text, topic text, payload jsonb)")
        store.execute(INVOICE)
        store.execute("CREATE TABLE handled (order_number text PRIMARY KEY)")
        (both,), (handler,), (trigger,) = (
            blocks(text, kind) for kind in ("both", "handler", "trigger")
        )
        env = {"SHOP_DSN": app.conninfo, "MOM_DSN": mom.conninfo}
        done = run([sys.executable, "-c", both], env=env)
        assert done.returncode == 0, done.stderr
        assert fetch(shop, "SELECT id FROM old_outbox") == [("A-1",)]
        # a program that nobody can change writes to the old table alone
        shop.execute(trigger.encode())
        shop.execute(
            "INSERT INTO old_outbox VALUES ('A-2', 'billing', '{\"order\": \"A-2\", \"total\": 7}')"
        )
        # the old consumer was first with one of them
        store.execute("INSERT INTO handled VALUES ('A-1')")
        store.execute("INSERT INTO invoice VALUES ('A-1', 90)")
        forward(app, mom=mom)
        (folder / "consumers.py").write_text(handler)
        done = run([BIN / "saf", "worker", "consumers:worker", "--drain"], env=env, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert fetch(store, "SELECT number, total FROM invoice ORDER BY 1") == [
            ("A-1", 90),
            ("A-2", 7),
        ]
