"""The tables of docs/troubleshooting.md: each symptom is caused for real, and its row ends it.

`ELSEWHERE` names the tests of other files that cause a symptom, find its text, and end it.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import saf
from saf.broker.embedded import EmbeddedServer
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, SchemaMissing, UsageError
from saf.receiving.inbox import GUARD
from tests.needed import absent, needed
from tests.pages import prepared
from tests.pipeline import connect
from tests.poolers import PgBouncer
from tests.programs import (
    BIN,
    INSTALLED,
    NAMELESS_HOST,
    ROOT,
    configuration,
    environment,
    run,
    send,
)
from tests.programs import saf as saf_program
from tests.receivers import running
from tests.restored import burn_transaction_ids, elsewhere, restore
from tests.ring import leave_slot
from tests.roles import as_user
from tests.symptoms import (
    AGAIN,
    OPERATOR,
    Row,
    Site,
    arrived,
    forward,
    handle,
    purging,
    rows,
    seen,
    symptom,
)
from tests.waits import until

__all__ = ["elsewhere"]

pytestmark = pytest.mark.full

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "`AutocommitError`": (
        "tests/integration/test_outbox.py::test_a_psycopg_connection_in_autocommit_is_refused",
        "tests/integration/test_outbox.py::test_an_open_transaction_makes_autocommit_acceptable",
    ),
    "`InvalidMessage`": (
        "tests/unit/test_message.py::test_bad_input_is_refused_by_the_name_of_its_field",
    ),
    '"was not heard of for': (
        "tests/spark/test_frozen.py::test_what_is_stopped_loses_its_shards_to_the_next_run",
    ),
    '"the Spark job failed"': (
        "tests/spark/test_killed_workers.py::test_a_loop_notes_the_problem_and_goes_on",
    ),
    'exit code 75, "Spark has ended"': (
        "tests/spark/test_connect.py::test_after_its_server_was_killed_the_next_run_goes_on",
    ),
    '"Spark needs Java 17 or newer"': (
        "tests/spark/test_java.py::test_without_any_java_the_error_says_what_to_install",
        "tests/spark/test_java.py::test_java_on_path_is_used_from_17_on",
    ),
    'exit code 75, "stopped, with work in hand': (
        "tests/contract/test_stopping.py"
        "::test_a_handler_that_takes_longer_than_the_stop_timeout_is_rolled_back_and_named",
    ),
    '"has not answered for': (
        "tests/contract/test_hangs.py"
        "::test_a_stopped_server_process_at_one_destination_stops_no_other",
    ),
    'a stream ends with "the table was removed': (
        "tests/contract/test_micro_batches.py::test_a_table_that_lacks_what_was_before_is_refused",
    ),
    '"its table was rolled back': (
        "tests/contract/test_iceberg.py"
        "::test_a_rollback_whose_marks_have_expired_is_refused_and_a_way_out_is_named",
    ),
    "a dialog ends with an Error": (
        "tests/integration/test_conversations_page.py"
        "::test_the_ends_compare_and_those_that_have_failed_are_shown",
    ),
    '"the rows do not show how': (
        "tests/moves/test_copies.py"
        "::test_a_storage_copy_that_caught_up_by_logical_replication_loses_nothing",
    ),
}
"""The start of a row, and the tests of other files that are about its symptom."""

SLOWER = """
CREATE FUNCTION slower() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END $$;
CREATE TRIGGER slower AFTER INSERT ON saf.inbox FOR EACH STATEMENT EXECUTE FUNCTION slower()
"""
"""Each chunk takes a tenth of a second."""
STATUS = "SELECT status FROM saf.outbox_status ORDER BY id"
CLUSTER = "local-cluster[1,1,1024]"
"""A master that starts an executor in a process of its own."""
WORKER = """
import os
import saf

worker = saf.Worker(os.environ["MOM_DSN"], "{subscription}"{options})


@worker.handler({types})
def handle(message, connection):
    {body}
"""
KEEP = 'connection.execute("INSERT INTO handled VALUES (%s)", [message.text()])'
PICKY = f"""if message.text() == "message 2":
        raise ValueError("no such article")
    {KEEP}"""
HANDLED = "CREATE TABLE handled (body text)"
IMPATIENT = f"""#!{sys.executable}
from saf.operating import doctor

limits = doctor.examine.__kwdefaults__["limits"]
object.__setattr__(limits, "long_seconds", 0.0)
from saf.cli import main

main()
"""
"""A saf whose doctor does not wait for five minutes before it names a transaction."""
WITHOUT_ARROW = f"""#!{sys.executable}
import sys

sys.modules["pyarrow"] = None
from saf.cli import main

main()
"""


@pytest.fixture
def site(app: Dsn, mom: Dsn, tmp_path: Path) -> Site:
    """A source and a store, where the service billing lives."""
    return Site(prepared(tmp_path, app, mom), app, mom)


def program(folder: Path, source: str) -> str:
    """Write a program `saf`, and return a PATH where it comes first."""
    file = folder / "bin" / "saf"
    file.parent.mkdir()
    file.write_text(source)
    file.chmod(0o755)
    return f"{file.parent}:{INSTALLED}"


def status(app: Dsn) -> list[str]:
    """Return the states of the messages of a source."""
    with connect(app) as connection:
        return [state for (state,) in fetch(connection, STATUS)]


def worker(
    site: Site, body: str = KEEP, *, subscription: str = "billing", types: str = "", **options: str
) -> None:
    """Write the worker of consumers.py, whose handler does this."""
    listed = "".join(f", {name}={value}" for name, value in options.items())
    (site.folder / "consumers.py").write_text(
        WORKER.format(body=body, subscription=subscription, types=types, options=listed)
    )


def handled(mom: Dsn) -> list[str]:
    """Return the bodies that the worker has handled."""
    with connect(mom) as connection:
        return [body for (body,) in fetch(connection, "SELECT body FROM handled")]


@pytest.fixture
def stored(site: Site) -> list[str]:
    """Three messages, which are stored and not handled yet; their bodies."""
    with connect(site.mom) as connection:
        connection.execute(HANDLED)
    sent = send(site.app, 3)
    forward(site.folder, 0)
    return sent


@contextmanager
def loop(site: Site, log: Path) -> Iterator[Path]:
    """Keep a forwarder running, which has forwarded a message; yield its standard error."""
    command: list[str | Path] = [BIN / "saf", "forward", "--loop", "--interval", "0.1"]
    send(site.app, 1, "first")
    with (
        log.open("w") as file,
        subprocess.Popen(command, cwd=site.folder, env=environment(), stderr=file) as process,
    ):
        until(lambda: arrived(site.mom))
        yield log
        process.terminate()


def terminate(printed: str, app: Dsn) -> int:
    """Run the statement that the doctor prints, and return the pid that it ends."""
    (pid,) = set(re.findall(r"SELECT pg_terminate_backend\((\d+)\)", printed))
    with connect(app) as connection:
        connection.execute(f"SELECT pg_terminate_backend({pid})")
    return int(pid)


# The page


def test_each_row_is_followed() -> None:
    tree = ast.parse(Path(__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    followed = [
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "symptom"
        and isinstance(call.args[0], ast.Constant)
    ]
    here, elsewhere = ({symptom(str(start)) for start in of} for of in (followed, ELSEWHERE))
    assert [row.symptom for row in rows() if row not in here | elsewhere] == []
    assert here & elsewhere == set()


def test_the_tests_of_other_files_exist() -> None:
    for name in (name for names in ELSEWHERE.values() for name in names):
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(), name


# A message does not arrive


def test_a_transaction_that_stays_open(site: Site, tmp_path: Path) -> None:
    (examine,) = symptom("no row in `saf.outbox_status`, nor").commands
    with site.app.connect(role="shop") as connection:
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', 'open')")
        assert status(site.app) == []
        printed = site.run(examine, path=program(tmp_path, IMPATIENT))
        assert f"pg_terminate_backend({connection.info.backend_pid})" in printed
    forward(site.folder, 0)
    assert arrived(site.mom) == ["open"]


def hold(site: Site, name: str = "remind") -> str:
    """Hold a message for a day, and return its id."""
    outbox = saf.Outbox(from_service="shop")
    with site.app.connect(role="shop") as connection:
        later = datetime.now(UTC) + timedelta(days=1)
        return str(outbox.send(connection, "billing", name, name=name, deliver_at=later))


OVERDUE = "UPDATE saf.held SET due = now() - interval '1 min' WHERE due IS NOT NULL"


def test_a_message_that_is_due_later(site: Site) -> None:
    row = symptom("no row in `saf.outbox_status`, and")
    hold(site)
    assert status(site.app) == []
    seen(row.quoted, site.run("saf message remind"))
    forward(site.folder, 0)
    assert arrived(site.mom) == []
    site.run(*row.commands, SERVICE="billing", NAME="remind")
    assert arrived(site.mom) == ["remind"]


def test_a_message_that_is_overdue(site: Site) -> None:
    row = symptom("`overdue` in")
    hold(site)
    with connect(site.app) as connection:
        connection.execute(OVERDUE)
    assert "overdue" in site.run("saf held list")
    site.run(*row.commands)
    assert arrived(site.mom) == ["remind"]


def test_a_message_that_was_refused(site: Site) -> None:
    row = symptom("`refused` in")
    hold(site)
    check = "ALTER TABLE saf.outbox ADD CONSTRAINT polite CHECK (body <> 'remind') NOT VALID"
    with connect(site.app) as connection:
        connection.execute(check)
        connection.execute(OVERDUE)
    forward(site.folder, 0)
    assert "refused" in site.run("saf held list")
    examine, run_, retry, again = row.commands
    found = site.run(examine)
    assert "was refused when due" in found
    assert "polite" in found
    with connect(site.app) as connection:
        connection.execute("ALTER TABLE saf.outbox DROP CONSTRAINT polite")
    site.run(run_, retry, again, SERVICE="billing")
    assert arrived(site.mom) == ["remind"]


def test_a_held_message_of_an_older_backup(site: Site, elsewhere: EmbeddedServer) -> None:
    row = symptom("a held message arrives again")
    ids = [hold(site, name) for name in ("first", "second")]
    with connect(site.app) as connection:
        connection.execute(OVERDUE)
    backup = restore(site.app, elsewhere)
    forward(site.folder, 0)
    assert sorted(arrived(site.mom)) == ["first", "second"]
    site.replace(site.app.conninfo, backup.conninfo)
    site = Site(site.folder, backup, site.mom)
    site.run("saf rebase")
    _, listed, shown, cancel = row.commands
    assert "overdue" in site.run(listed)
    assert "stored" in site.run(shown, ID=ids[0])
    site.run(cancel, SERVICE="billing", NAME="first")
    forward(site.folder, 0)
    assert sorted(arrived(site.mom)) == ["first", "second", "second"]
    with connect(site.mom) as store:
        copies = "SELECT count(*) FROM saf.inbox WHERE message_id = %(id)s"
        assert fetch(store, copies, {"id": ids[1]}) == [(2,)]


def test_no_forwarder_runs(site: Site) -> None:
    row = symptom("`pending`, and `saf status`")
    sent = send(site.app, 3)
    assert set(status(site.app)) == {"pending"}
    seen(row.quoted, site.run("saf status"))
    site.run(*row.commands)
    assert arrived(site.mom) == sent


def test_a_forwarder_of_another_database(site: Site, other: Dsn) -> None:
    listed, forwarded = symptom("`pending`, although a forwarder runs").commands
    sent = send(site.app, 3)
    site.replace(f"dbname={site.app.database}", f"dbname={other.database}")
    assert re.search(r"shop +0 ", site.run(listed))
    site.run(forwarded)
    assert set(status(site.app)) == {"pending"}
    site.replace(f"dbname={other.database}", "dbname=nowhere")
    assert "dbname=nowhere" in site.fails(forwarded, OPERATOR)
    site.replace("dbname=nowhere", f"dbname={site.app.database}")
    assert re.search(r"shop +3 ", site.run(listed, forwarded))
    assert arrived(site.mom) == sent


def test_a_message_for_a_broker_that_is_not_in_the_settings(site: Site, other: Dsn) -> None:
    row = symptom('`parked`, "no destination is known to be broker"')
    with connect(site.app) as source, connect(other) as hub:
        ((broker,),) = fetch(hub, "SELECT broker_id FROM saf.broker")
        source.execute(
            "INSERT INTO saf.outbox (to_service, to_broker, body) VALUES ('billing', %s, 'hub')",
            [broker],
        )
    forward(site.folder, 0)
    seen(row.quoted, site.run("saf parked list"))
    site.append(f"[destinations.hub]\ndsn = '{other.conninfo}'\n")
    site.run(*row.commands)
    assert (arrived(other), arrived(site.mom)) == (["hub"], [])


def test_a_message_that_the_store_rejects(site: Site) -> None:
    grouped, retried, forwarded = symptom("`dead`").commands
    with connect(site.mom) as store:
        store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT small CHECK (body <> 'message 2')")
    sent = send(site.app, 3)
    forward(site.folder, 0)
    assert sorted(status(site.app)) == ["dead", "forwarded", "forwarded"]
    (group,) = re.findall(r"\b[0-9a-f]{8,}\b", site.run(grouped))
    with connect(site.mom) as store:
        store.execute("ALTER TABLE saf.inbox DROP CONSTRAINT small")
    site.run(retried, forwarded, ID=group)
    assert sorted(arrived(site.mom)) == sorted(sent)


def test_no_worker_runs(site: Site, stored: list[str]) -> None:
    counted, started = symptom("`forwarded`, and `saf inbox peek` shows it").commands
    assert set(status(site.app)) == {"forwarded"}
    assert "order 1" in site.run("saf inbox peek billing")
    assert re.search(r"billing +3 ", site.run(counted))
    worker(site)
    site.run(f"{started} --drain", MODULE="consumers", WORKER="worker")
    assert handled(site.mom) == stored


def test_a_handler_that_ignores_a_message(site: Site, stored: list[str]) -> None:
    (found,) = symptom("`forwarded`, and `saf inbox peek` does not show it").commands
    worker(site, "pass")
    site.run("saf worker consumers:worker --drain")
    assert "order 1" not in site.run("saf inbox peek billing")
    with connect(site.app) as source:
        ((message,), *_) = fetch(source, "SELECT message_id FROM saf.outbox")
    assert re.search("taken +billing", site.run(found, ID=str(message)))
    assert (len(stored), handled(site.mom)) == (3, [])


# Sending fails


def test_sending_where_no_schema_is(site: Site, new_database: Callable[[str], Dsn]) -> None:
    row = symptom("`SchemaMissing`")
    bare = new_database("bare")
    with bare.connect(role="shop") as connection, pytest.raises(SchemaMissing) as error:
        saf.Outbox().send(connection, "billing", b"")
    seen(row.quoted, str(error.value))
    moved = Site(prepared(site.folder, bare, site.mom), bare, site.mom)
    moved.run(*row.commands)
    with bare.connect(role="shop") as connection:
        saf.Outbox().send(connection, "billing", b"sent")
    forward(site.folder, 0)
    assert arrived(site.mom) == ["sent"]


def test_sending_without_the_right(new_role: Callable[..., str], site: Site) -> None:
    row = symptom('"may not do this: permission denied')
    role = new_role()
    login = as_user(site.app, role)
    with login.connect(role="shop") as connection, pytest.raises(ConfigurationError) as error:
        saf.Outbox().send(connection, "billing", b"")
    seen(row.quoted, str(error.value))
    site.run(*row.commands, LOGIN=role)
    with login.connect(role="shop") as connection:
        saf.Outbox().send(connection, "billing", b"sent")
    forward(site.folder, 0)
    assert arrived(site.mom) == ["sent"]


def test_sending_by_a_connection_that_is_none(site: Site) -> None:
    cannot_use, cannot_await = symptom('"cannot use a').quoted
    outbox = saf.Outbox()
    with closing(sqlite3.connect(":memory:")) as lite, pytest.raises(UsageError) as error:
        outbox.send(lite, "billing", b"")  # type: ignore[arg-type]
    seen([cannot_use], str(error.value))

    async def business() -> None:
        with site.app.connect(role="shop") as plain, pytest.raises(UsageError) as error:
            await outbox.asend(plain, "billing", b"")  # type: ignore[arg-type]
        seen([cannot_await], str(error.value))
        assert "psycopg's AsyncConnection" in str(error.value)
        async with await psycopg.AsyncConnection.connect(site.app.conninfo) as connection:
            await outbox.asend(connection, "billing", b"sent")

    asyncio.run(business())
    forward(site.folder, 0)
    assert arrived(site.mom) == ["sent"]


# The forwarder ends, or does nothing


def test_messages_that_wait(site: Site) -> None:
    row = symptom('"messages wait for')
    with connect(site.app) as source:
        source.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('shipping', 'late')")
    forward(site.folder, 0)
    seen(row.quoted, forward(site.folder, 0))
    with connect(site.mom) as store:
        create_service(store, "shipping")
    assert "shipping" in site.run(*row.commands)
    assert arrived(site.mom) == ["late"]


@pytest.mark.parametrize("wrong", ["no role", "no login", "no database"])
def test_a_login_that_is_refused(
    new_role: Callable[..., str], server: EmbeddedServer, site: Site, wrong: str
) -> None:
    row = symptom('exit code 2, "refuses the login"')
    role = new_role()
    with connect(server.dsn("postgres")) as connection:
        connection.execute(f"ALTER ROLE {role} NOLOGIN")
    parameters = {
        "no role": {"user": "nobody_of_this_name"},
        "no login": {"user": role},
        "no database": {"dbname": "nowhere"},
    }[wrong]
    refused = Dsn(make_conninfo(site.mom.conninfo, **parameters))
    sent = send(site.app, 3)
    file = site.folder / "saf.toml"
    configuration(file, {"shop": site.app}, {"mom": refused})
    seen(row.quoted, forward(site.folder, OPERATOR))
    configuration(file, {"shop": site.app}, {"mom": site.mom})
    site.run(*row.commands)
    assert arrived(site.mom) == sent


def test_a_forwarder_without_its_rights(new_role: Callable[..., str], site: Site) -> None:
    row = symptom('exit code 2, "refuses this user')
    role = new_role()
    sent = send(site.app, 3)
    login = as_user(site.mom, role)
    configuration(site.folder / "saf.toml", {"shop": site.app}, {"mom": login})
    seen(row.quoted, forward(site.folder, OPERATOR))
    site.run(*row.commands, LOGIN=role)
    assert arrived(site.mom) == sent


def test_a_connection_pooler(site: Site) -> None:
    row = symptom('exit code 2, "is reached through a connection pooler"')
    sent = send(site.app, 3)
    file = site.folder / "saf.toml"
    with PgBouncer(site.app, "transaction", size=5) as pooler:
        configuration(file, {"shop": pooler(site.app)}, {"mom": site.mom})
        seen(row.quoted, forward(site.folder, OPERATOR))
    configuration(file, {"shop": site.app}, {"mom": site.mom})
    site.run(*row.commands)
    assert arrived(site.mom) == sent


def test_a_row_of_a_fleet_that_is_wrong(site: Site, other: Dsn) -> None:
    row = symptom('exit code 2, "fleet …, row')
    with connect(site.app) as connection:
        connection.execute("CREATE TABLE tenant (name text, dsn text)")
        tenants = [("acme", site.app.conninfo), ("ajax", "nonsense")]
        connection.cursor().executemany("INSERT INTO tenant VALUES (%s, %s)", tenants)
    query = "SELECT name, dsn FROM tenant ORDER BY name"
    site.replace("[brokers.shop]", f"[fleets.shops]\nquery = '{query}'")
    sent, more = send(site.app, 3), send(other, 2, "other")
    seen(row.quoted, forward(site.folder, OPERATOR))
    assert arrived(site.mom) == sent
    with connect(site.app) as connection:
        connection.execute("UPDATE tenant SET dsn = %s WHERE name = 'ajax'", [other.conninfo])
    site.run(*row.commands)
    assert arrived(site.mom) == sent + more


def test_tables_that_a_cleaner_emptied(site: Site) -> None:
    row = symptom('"saf\'s own rows are gone"')
    tables = "SELECT string_agg(format('saf.%I', tablename), ', ') FROM pg_tables"
    with connect(site.app) as connection:
        ((names,),) = fetch(connection, f"{tables} WHERE schemaname = 'saf'")
        connection.execute(f"TRUNCATE {names}")
    seen(row.quoted, forward(site.folder, OPERATOR))
    site.run(*row.commands)
    sent = send(site.app, 3)
    forward(site.folder, 0)
    assert arrived(site.mom) == sent


@pytest.mark.parametrize("running", [False, True])
def test_policies_that_hide_rows(
    granted: Callable[..., Dsn], site: Site, tmp_path: Path, running: bool
) -> None:
    row = symptom('"row-level security of saf')
    at_start, while_it_runs = row.quoted
    login = granted(site.app, "forwarder")
    site.replace(site.app.conninfo, login.conninfo)
    with loop(site, tmp_path / "log") if running else nullcontext() as log:
        with connect(site.app) as owner:
            owner.execute("ALTER TABLE saf.cursor ENABLE ROW LEVEL SECURITY")
        sent = send(site.app, 3)
        if log is None:
            seen([at_start], forward(site.folder, OPERATOR))
        else:
            until(lambda: while_it_runs in log.read_text())
    examine, forwarded = row.commands
    (statement,) = re.findall(r"ALTER TABLE \S+ DISABLE ROW LEVEL SECURITY", site.run(examine))
    with connect(site.app) as owner:
        owner.execute(statement)
    site.run(forwarded)
    assert sorted(arrived(site.mom)) == sorted(["first 1", *sent] if running else sent)


def test_a_publication_of_a_table_without_an_identity(site: Site) -> None:
    row = symptom('"it does not have a replica identity')
    sent = send(site.app, 3)
    with connect(site.app) as owner:
        owner.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        owner.execute("ALTER TABLE saf.cursor REPLICA IDENTITY NOTHING")
    seen(row.quoted, forward(site.folder, OPERATOR))
    examine, forwarded = row.commands
    (statement,) = re.findall(r"ALTER TABLE \S+ REPLICA IDENTITY FULL", site.run(examine))
    with connect(site.app) as owner:
        owner.execute(statement)
    site.run(forwarded)
    assert arrived(site.mom) == sent


@pytest.mark.parametrize("quote", [0, 1], ids=["moved", "set-back"])
def test_a_database_that_came_back(
    site: Site, backup: Callable[[Dsn], Dsn], elsewhere: EmbeddedServer, quote: int
) -> None:
    row = symptom('exit code 2, "cannot be used as it was restored or moved"')
    burn_transaction_ids(site.app)
    sent = send(site.app, 3)
    forward(site.folder, 0)
    if quote == 0:
        sent += send(site.app, 2, "pending")
        back = restore(site.app, elsewhere)
    else:
        back = backup(site.app)
        sent += send(site.app, 2, "later")
        forward(site.folder, 0)
    site.replace(site.app.conninfo, back.conninfo)
    sent += send(back, 2, "newer")
    seen([row.quoted[quote]], forward(site.folder, OPERATOR))
    Site(site.folder, back, site.mom).run(*row.commands)
    assert sorted(arrived(site.mom)) == sorted(sent)


def test_a_forwarder_that_hangs(site: Site) -> None:
    held, taken_over = symptom('"nothing to do: other'), symptom("`taken_over`")
    assert taken_over.cure.startswith("nothing")
    with connect(site.mom) as store:
        store.execute(SLOWER)
    site.append("lease_seconds = 10\nchunk_rows = 10\n[bounds]\nstatement_seconds = 3\n")
    sent = send(site.app, 300)
    command: list[str | Path] = [BIN / "saf", "forward"]
    with subprocess.Popen(
        command, cwd=site.folder, env=environment(), stderr=subprocess.PIPE, text=True
    ) as hanging:
        try:
            until(lambda: arrived(site.mom))
            hanging.send_signal(signal.SIGSTOP)
            seen(held.quoted, site.run(*held.commands))
            again = partial(saf_program, "forward", cwd=site.folder)
            until(lambda: again() and len(arrived(site.mom)) == 300, 120)
            hanging.send_signal(signal.SIGCONT)
            _, printed = hanging.communicate(timeout=60)
        finally:
            hanging.kill()
    assert "taken_over" in printed
    assert sorted(arrived(site.mom)) == sorted(sent)


def test_packages_that_are_missing(site: Site, tmp_path: Path) -> None:
    row = symptom('"needs more packages"')
    sent = send(site.app, 3)
    path = program(tmp_path, WITHOUT_ARROW)
    failed = site.run(f"{row.commands[0]} 2>&1 || test $? = {OPERATOR}", path=path)
    seen(row.quoted, failed)
    site.run(*row.commands)
    assert arrived(site.mom) == sent


def test_a_host_whose_name_does_not_resolve(site: Site) -> None:
    row = symptom('"the name of this host, …')
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    nameless: list[str | Path] = [needed("unshare", "util-linux"), *as_root, *NAMELESS_HOST]
    if subprocess.run([*nameless, "true"], check=False, capture_output=True).returncode:
        absent("a user namespace", "sysctl kernel.unprivileged_userns_clone=1")
    command = [*nameless, BIN / "saf", "forward", "--spark", "always", "--master", CLUSTER]
    sent = send(site.app, 3)
    done = run(command, cwd=site.folder)
    assert done.returncode == OPERATOR, done.stderr
    seen(row.quoted, done.stderr)
    assert "`SPARK_LOCAL_IP`" in row.cure
    addressed = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    done = run(command, cwd=site.folder, env=addressed, tracebacks=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert arrived(site.mom) == sent


# Receiving fails, or repeats


def test_a_subscription_that_does_not_exist(site: Site) -> None:
    row = symptom('"has no subscription')
    worker(site, subscription="shipping")
    seen(row.quoted, site.fails("saf worker consumers:worker --drain", OPERATOR))
    site.run(*row.commands, NAME="shipping")
    with connect(site.app) as source, connect(site.mom) as store:
        store.execute(HANDLED)
        source.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('shipping', 'sent')")
    forward(site.folder, 0)
    site.run("saf worker consumers:worker --drain")
    assert handled(site.mom) == ["sent"]


def test_a_handler_that_raises(site: Site, stored: list[str]) -> None:
    listed, retried = symptom("`message_failed`").commands
    worker(site, "raise ValueError('no such article')")
    assert "message_failed" in site.fails("saf worker consumers:worker --drain", AGAIN)
    assert "no such article" in site.run(listed)
    worker(site)
    site.run(retried, "saf worker consumers:worker --drain")
    assert sorted(handled(site.mom)) == stored


def test_a_handler_that_gives_up(site: Site, stored: list[str]) -> None:
    listed, shown, retried = symptom("`dead_letter`").commands
    worker(site, PICKY, policy="saf.Policy(permanent=(ValueError,))")
    assert "dead_letter" in site.fails("saf worker consumers:worker --drain", 1)
    (number,) = re.findall(r"^mom +(\d+) ", site.run(listed), re.MULTILINE)
    assert site.run(shown, NUMBER=number) == "message 2"
    worker(site)
    site.run(retried, "saf worker consumers:worker --drain", NUMBER=number)
    assert sorted(handled(site.mom)) == stored


@pytest.mark.parametrize(("guarded", "times"), [(False, 2), (True, 1)])
def test_work_outside_of_the_transaction(
    site: Site, stored: list[str], other: Dsn, guarded: bool, times: int
) -> None:
    assert "`saf.inbox_once`" in symptom("a handler's work was done twice").cure
    with connect(other) as elsewhere:
        elsewhere.execute(f"{GUARD};{HANDLED}")
        for fails in (True, *(False for _ in stored)):
            with suppress(ConnectionError), saf.receive(site.mom, "billing") as delivery:
                for message in delivery:
                    if not guarded or saf.inbox_once(elsewhere, "billing", message):
                        elsewhere.execute("INSERT INTO handled VALUES (%s)", [message.text()])
                if fails:
                    raise ConnectionError
    assert sorted(handled(other)) == sorted(stored * times)


class Silent(saf.Processor):
    """Does nothing with its messages."""

    @saf.handles()
    def ignore(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        """Do nothing."""


def test_processors_and_receivers_of_one_subscription(site: Site) -> None:
    row = symptom('"processors own the shards"')

    def refusal() -> str:
        try:
            with saf.receive(site.mom, "billing"):
                return ""
        except UsageError as error:
            return str(error)

    with running(saf.Processors(site.mom, "billing", Silent)):
        until(refusal)
        seen(row.quoted, refusal())
        site.run(*row.commands, NAME="audit")
        sent = send(site.app, 3)
        forward(site.folder, 0)
        with saf.receive(site.mom, "audit") as delivery:
            assert sorted(message.text() for message in delivery) == sent


def test_messages_without_a_handler(site: Site, stored: list[str]) -> None:
    (counted,) = symptom("messages wait, and the log has `no_handler`").commands
    with connect(site.app) as source:
        source.execute(
            "INSERT INTO saf.outbox (to_service, message_type, body) VALUES ('billing', 'New', 'x')"
        )
    forward(site.folder, 0)
    worker(site, types='""')
    assert "no_handler" in site.fails("saf worker consumers:worker --drain", 1)
    assert "New" in site.run(counted)
    worker(site)
    site.run("saf worker consumers:worker --drain")
    assert sorted(handled(site.mom)) == sorted([*stored, "x"])


def test_a_worker_whose_database_holds_a_lock(site: Site, stored: list[str]) -> None:
    (examine,) = symptom("`delivery_failed`").commands
    worker(site)
    file = site.folder / "log"
    command: list[str | Path] = [BIN / "saf", "worker", "consumers:worker"]
    with (
        closing(site.mom.connect(role="report")) as report,
        file.open("w") as log,
        subprocess.Popen(
            command, cwd=site.folder, env=environment(MOM_DSN=site.mom.conninfo), stderr=log
        ) as process,
    ):
        report.execute("LOCK TABLE saf.cursor IN ACCESS EXCLUSIVE MODE")
        until(lambda: "delivery_failed" in file.read_text())
        assert terminate(site.run(examine), site.app) == report.info.backend_pid
        until(lambda: len(handled(site.mom)) == 3)
        process.terminate()
    assert sorted(handled(site.mom)) == stored


# Disks fill


@pytest.mark.parametrize(("log", "broker"), [("outbox", ""), ("inbox", " --broker mom")])
def test_a_log_that_nobody_purges(site: Site, log: str, broker: str) -> None:
    row = symptom("an outbox or an inbox grows")
    purging(site.folder)
    send(site.app, 3)
    forward(site.folder, 0)
    handle(site.mom)
    with connect(site.mom if broker else site.app) as connection:
        leave_slot(connection, log)
    looked, purged = (f"saf purge{dry}{broker}" for dry in (" --dry-run", ""))
    assert {looked, purged} < {*row.commands}
    assert re.search(rf"{log} +0 +purgeable +3", site.run(looked))
    assert re.search(rf"{log} +0 +purged +3", site.run(purged))


def test_a_log_without_a_subscription(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    created, purged = symptom("`unread` in `saf purge`").commands
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    site = Site(purging(tmp_path), app, mom)
    send(app, 3)
    forward(tmp_path, 0)
    with connect(mom) as connection:
        leave_slot(connection, "inbox")
    assert re.search("inbox +0 +unread", site.run(purged))
    site.run(created, NAME="billing")
    handle(mom)
    assert re.search("inbox +0 +purged +3", site.run(purged))


def test_a_slot_that_a_transaction_has_read(site: Site, tmp_path: Path) -> None:
    examine, purged = symptom("`locked` in `saf purge`").commands
    purging(site.folder)
    send(site.app, 3)
    forward(site.folder, 0)
    with connect(site.app) as connection:
        leave_slot(connection)
    with closing(site.app.connect(role="report")) as report:
        report.execute("SELECT count(*) FROM saf.outbox")
        assert re.search("outbox +0 +locked", site.run(purged))
        printed = site.run(examine, path=program(tmp_path, IMPATIENT))
        assert terminate(printed, site.app) == report.info.backend_pid
    assert re.search("outbox +0 +purged +3", site.run(purged))


# Something else


@pytest.mark.parametrize(
    ("row", "old", "new"),
    [
        (symptom('"unknown setting'), "[forwarder]", "[forwarder]\nlease_secs = 5"),
        (symptom('"… is not from'), "[forwarder]", "[forwarder]\nlease_seconds = 0.5"),
        (symptom('"needs the environment variable'), "dbname=", "password=${SHOP_PW} dbname="),
    ],
    ids=["unknown", "out-of-range", "environment"],
)
def test_a_setting_that_is_wrong(site: Site, row: Row, old: str, new: str) -> None:
    sent = send(site.app, 3)
    site.replace(old, new)
    seen(row.quoted, forward(site.folder, OPERATOR))
    site.replace(new, old)
    site.run(*row.commands)
    assert arrived(site.mom) == sent


def test_messages_that_a_store_has_lost(site: Site) -> None:
    row = symptom("`saf reconcile` reports `lost`")
    sent = send(site.app, 3)
    forward(site.folder, 0)
    with connect(site.mom) as store:
        store.execute("DELETE FROM saf.inbox WHERE id = 2")
    assert re.search("lost", site.fails("saf reconcile", 1))
    would, replayed, forwarded, compared = row.commands
    assert "1" in site.run(would)
    site.run(replayed, forwarded)
    site.fails(compared, 0)
    assert sorted(arrived(site.mom)) == sent
