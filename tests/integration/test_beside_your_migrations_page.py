"""docs/beside-your-migrations.md: its code and commands work in trees as users have them."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import saf.alembic
from saf.broker.migrate import BASELINE, migrate
from saf.database import REVISION, Dsn, check_schema, fetch
from tests.next_package import NEXT, next_package, python
from tests.pages import blocks, page, unmarked_shells
from tests.pipeline import connect
from tests.programs import activated, run, url

NewDatabase = Callable[[str], Dsn]

PAGE = page("beside-your-migrations.md")

MODELS = """
from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)


class Bill(Base):
    __tablename__ = "bills"
    __table_args__ = {"schema": "accounts"}
    number: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str] = mapped_column(ForeignKey("orders.number"))
"""

MAPPED = """

class DeadLetter(Base):
    __tablename__ = "dead_letter"
    __table_args__ = {"schema": "saf"}
    id: Mapped[int] = mapped_column(primary_key=True)
"""

CONFIGURE = re.compile(r"^( +)context\.configure\(\s*connection=connection[^)]*\)\n", re.MULTILINE)


def block(kind: str) -> str:
    (code,) = blocks(PAGE, kind)
    return code


def shell(script: str, folder: Path, dsn: Dsn) -> str:
    env = {"PATH": activated(), "DATABASE_URL": url(dsn)}
    done = run(["bash", "-euo", "pipefail", "-c", script], env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def tree(folder: Path, dsn: Dsn, *, template: str = "generic", configure: str = "") -> None:
    """Set up Alembic in a folder, as its users do, with the page's code in env.py."""
    shell(f"alembic init --template {template} migrations", folder, dsn)
    (folder / "models.py").write_text(MODELS)
    ini = folder / "alembic.ini"
    ini.write_text(
        re.sub("^sqlalchemy.url = .*$", f"sqlalchemy.url = {url(dsn)}", ini.read_text(), flags=re.M)
    )
    env = folder / "migrations" / "env.py"
    text = env.read_text().replace(
        "target_metadata = None",
        f"from models import Base\n\ntarget_metadata = Base.metadata\ninclude_name = {EVERYTHING}",
    )
    code = configure or block("env")
    text, replaced = CONFIGURE.subn(lambda found: textwrap.indent(code, found[1]), text)
    assert replaced == 1
    env.write_text(text)
    with connect(dsn) as connection:
        connection.execute("CREATE SCHEMA accounts")


EVERYTHING = "lambda name, type_, parent_names: True"


def written(folder: Path) -> list[str]:
    """The revisions of a tree, from the oldest on."""
    files = sorted(
        (folder / "migrations" / "versions").glob("*.py"), key=lambda f: f.stat().st_ctime
    )
    return [file.read_text() for file in files]


def is_empty(revision: str) -> bool:
    return "op." not in revision


def of_user(dsn: Dsn) -> set[str]:
    with connect(dsn) as connection:
        check_schema(connection)
        rows = fetch(
            connection, "SELECT tablename FROM pg_tables WHERE schemaname IN ('public', 'accounts')"
        )
    return {name for (name,) in rows}


@pytest.fixture
def empty(new_database: NewDatabase) -> Dsn:
    return new_database("beside")


def test_every_command_of_the_page_is_run_here() -> None:
    assert unmarked_shells(PAGE) == []


@pytest.mark.slow
def test_autogenerating_twice_finds_nothing_beside_saf(empty: Dsn, tmp_path: Path) -> None:
    tree(tmp_path, empty)
    said = shell(block("alembic"), tmp_path, empty)
    assert "No new upgrade operations detected" in said
    assert of_user(empty) == {"orders", "bills", "alembic_version"}
    shell("alembic revision --autogenerate -m again", tmp_path, empty)
    first, second = written(tmp_path)
    assert "saf" not in first
    assert first.count("op.create_table") == 2
    assert is_empty(second)
    # each way back touches its own only
    shell("alembic upgrade head; alembic downgrade base", tmp_path, empty)
    assert of_user(empty) == {"alembic_version"}


@pytest.mark.slow
def test_without_the_function_autogenerate_would_drop_saf(app: Dsn, tmp_path: Path) -> None:
    naive = block("env").replace("saf.alembic.include_name", "include_name")
    tree(tmp_path, app, configure=naive)
    shell("alembic revision --autogenerate -m naive", tmp_path, app)
    (revision,) = written(tmp_path)
    assert "op.drop_table('outbox', schema='saf')" in revision


@pytest.mark.slow
@pytest.mark.parametrize("helped", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_model_that_maps_a_table_of_saf_changes_nothing_there(
    app: Dsn, tmp_path: Path, helped: bool
) -> None:
    more = "    include_object=saf.alembic.include_object,\n)" if helped else ")"
    tree(tmp_path, app, configure=block("env").rstrip()[:-1] + more + "\n")
    with (tmp_path / "models.py").open("a") as models:
        models.write(MAPPED)
    shell("alembic revision --autogenerate -m orders", tmp_path, app)
    (revision,) = written(tmp_path)
    assert ("schema='saf'" in revision) is not helped
    assert "op.create_table('orders'" in revision


def test_the_names_that_autogenerate_leaves_out_are_safs_alone() -> None:
    include = saf.alembic.include_name
    table = {"schema_name": "saf", "table_name": "outbox"}
    assert not include("saf", "schema", {})
    assert not include("shard", "column", table)
    for name, type_, parents in (
        (None, "schema", {}),
        ("safe", "schema", {}),
        ("saf", "table", {"schema_name": None}),
        ("saf", "table", {"schema_name": "accounts"}),
    ):
        assert include(name, type_, parents)


def test_the_python_of_the_page_says_what_it_has_done(empty: Dsn) -> None:
    done = run([sys.executable, "-c", block("python")], env={"DATABASE_URL": url(empty)})
    assert done.stdout == (
        f"{empty.database}: saf schema {REVISION}, created with 64 shards\nFalse\n"
    )


# In the application's own tree


def own_tree(folder: Path, dsn: Dsn, *, template: str = "generic", **changed: str) -> None:
    tree(folder, dsn, template=template)
    text = block("revision")
    for before, after in changed.items():
        assert before in text
        text = text.replace(before, after)
    (folder / "migrations" / "versions" / "a1_saf.py").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_revision_of_the_application_brings_safs_schema(
    empty: Dsn, tmp_path: Path, driver: str
) -> None:
    own_tree(tmp_path, empty, template="async" if driver == "asyncpg" else "generic")
    ini = tmp_path / "alembic.ini"
    ini.write_text(ini.read_text().replace("+psycopg:", f"+{driver}:"))
    shell("alembic upgrade head", tmp_path, empty)
    shell("alembic revision --autogenerate -m orders; alembic upgrade head", tmp_path, empty)
    assert of_user(empty) == {"orders", "bills", "alembic_version"}
    assert "No new upgrade operations" in shell("alembic check", tmp_path, empty)
    with connect(empty) as connection:
        saf.Outbox(allow_autocommit=True).send(connection, "billing", "")

    shell("alembic downgrade base", tmp_path, empty)
    with connect(empty) as connection:
        assert fetch(connection, "SELECT to_regnamespace('saf')") == [(None,)]
    shell("alembic upgrade head", tmp_path, empty)
    assert of_user(empty) == {"orders", "bills", "alembic_version"}


def test_a_database_that_has_the_schema_joins_the_tree_with_its_messages(
    app: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        saf.Outbox(allow_autocommit=True).send(connection, "billing", "")
    own_tree(tmp_path, app)
    shell("alembic upgrade head", tmp_path, app)
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.outbox") == [(1,)]
        assert fetch(connection, "SELECT version_num FROM public.alembic_version") == [("a1",)]


def test_a_failing_revision_leaves_neither_schema(empty: Dsn, tmp_path: Path) -> None:
    own_tree(tmp_path, empty, **{'op.saf_upgrade("0051")': 'op.saf_upgrade("0051"); 1 / 0'})
    env = {"PATH": activated()}
    done = run(["alembic", "upgrade", "head"], env=env, cwd=tmp_path, tracebacks=True)
    assert "division by zero" in done.stderr
    with connect(empty) as connection:
        assert fetch(connection, "SELECT to_regnamespace('saf')") == [(None,)]


def test_an_older_revision_than_the_package_knows_means_its_first(
    empty: Dsn, tmp_path: Path
) -> None:
    own_tree(tmp_path, empty, **{'"0051")': '"0012", shards=7)'})
    shell("alembic upgrade head", tmp_path, empty)
    with connect(empty) as connection:
        assert fetch(
            connection, "SELECT version_num, shards FROM saf.alembic_version, saf.broker"
        ) == [(BASELINE, 7)]


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ('saf_upgrade("0999")', "'0999' is not a revision of saf's schema: this version of the"),
        pytest.param(
            *('saf_upgrade("head")', "'head' is not a revision of saf's schema"),
            marks=pytest.mark.full,
        ),
        ('saf_upgrade("0051", shards=0)', "shards: expected a number from 1 to 1024, got 0"),
        pytest.param(
            *('saf_downgrade("base")', "'base' is not a revision of saf's schema"),
            marks=pytest.mark.full,
        ),
        (
            "get_context()\n    with op.get_context().autocommit_block():\n"
            '        op.saf_upgrade("0051")',
            "in autocommit and no transaction is open",
        ),
    ],
)
def test_a_wrong_operation_fails_with_a_sentence(
    empty: Dsn, tmp_path: Path, operation: str, said: str
) -> None:
    own_tree(tmp_path, empty, **{'saf_upgrade("0051")': operation})
    done = run(["alembic", "upgrade", "head"], env={"PATH": activated()}, cwd=tmp_path)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    with connect(empty) as connection:
        assert fetch(connection, "SELECT to_regclass('saf.broker')") == [(None,)]


def test_the_tree_as_sql_brings_the_same(empty: Dsn, tmp_path: Path) -> None:
    own_tree(tmp_path, empty)
    script = run(["alembic", "upgrade", "head", "--sql"], env={"PATH": activated()}, cwd=tmp_path)
    assert script.returncode == 0, script.stderr
    assert script.stdout.count("BEGIN;") == script.stdout.count("COMMIT;") == 1
    with empty.connect(role="test", autocommit=True) as connection:
        connection.execute(script.stdout.encode())
        check_schema(connection)
        assert fetch(connection, "SELECT version_num FROM public.alembic_version") == [("a1",)]
    assert not migrate(empty).changed


LATER = f"""
import saf.alembic
from alembic import op

revision = "a2"
down_revision = "a1"


def upgrade() -> None:
    op.saf_upgrade("{NEXT}", since="{REVISION}")


def downgrade() -> None:
    op.saf_downgrade("{REVISION}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("migrated_before", [False, True])
def test_a_later_revision_goes_up_and_back_in_the_tree(
    empty: Dsn, tmp_path: Path, migrated_before: bool
) -> None:
    package = next_package(tmp_path / "next")
    env = {"PATH": activated(), "PYTHONPATH": str(package)}
    own_tree(tmp_path, empty)
    (tmp_path / "migrations" / "versions" / "a2_later.py").write_text(LATER)

    def alembic(*arguments: str) -> str:
        done = run(["alembic", *arguments], env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def revision() -> str:
        with connect(empty) as connection:
            ((found,),) = fetch(connection, "SELECT version_num FROM saf.alembic_version")
        return str(found)

    if migrated_before:  # a1 meets a newer schema, and a2 its own
        python(package, "-m", "saf", "migrate", "--dsn", empty.conninfo)
    alembic("upgrade", "a1")
    assert revision() == (NEXT if migrated_before else REVISION)
    alembic("upgrade", "a2")
    assert revision() == NEXT
    alembic("downgrade", "a1")
    assert revision() == REVISION
    script = alembic("upgrade", "a1:a2", "--sql")
    with empty.connect(role="test", autocommit=True) as connection:
        connection.execute(script.encode())
    assert revision() == NEXT


# Flask-Migrate


@pytest.mark.slow
def test_flask_migrate_finds_nothing_the_second_time(empty: Dsn, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(block("flask"))
    said = shell(block("flask shell"), tmp_path, empty)
    assert "No new upgrade operations detected" in said
    assert of_user(empty) == {"order", "alembic_version"}
    (first,) = written(tmp_path)
    assert "saf" not in first
    again = shell("flask db migrate -m again", tmp_path, empty)
    assert "No changes in schema detected" in again
    assert written(tmp_path) == [first]
