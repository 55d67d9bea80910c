"""`saf init`: two empty databases, and at its end a message has gone from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.broker import services
from saf.config import load
from saf.database import Dsn, fetch
from saf.operating.plans.tables import granted
from tests.pipeline import connect, send
from tests.programs import saf

DONE, USAGE, TRY_AGAIN = 0, 2, 75


@pytest.fixture
def bare(new_database: Callable[[str], Dsn]) -> dict[str, str]:
    """The environment that names two empty databases."""
    return {
        "SHOP_DSN": new_database("shop").conninfo,
        "MOM_DSN": new_database("mom").conninfo,
    }


@pytest.fixture
def role(bare: dict[str, str]) -> Iterator[str]:
    dsn = Dsn(bare["SHOP_DSN"])
    name = f"{dsn.database}_role"
    with connect(dsn) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    yield name
    for each in (Dsn(bare["MOM_DSN"]), dsn):
        with connect(each) as connection:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
    with connect(dsn) as connection:
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def test_it_ends_with_a_message_that_was_received_and_a_file_that_explains_itself(
    bare: dict[str, str], tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = saf("init", "--sender", role, "--forwarder", role, cwd=tmp_path, env=bare)
    assert done.returncode == DONE, done.stderr
    shop, mom, *rest = done.stdout.splitlines()
    assert shop.startswith("shop: database ")
    assert mom.endswith(" created")
    assert rest[:4] == [
        f"shop: role {role} is writer",
        f"shop: role {role} is forwarder",
        f"mom: role {role} is forwarder",
        "wrote saf.toml: shop is its source and mom its destination; it explains the rest",
    ]
    assert rest[4].startswith("sent a message at shop, forwarded it, received it at mom: ")
    for name, value in bare.items():
        monkeypatch.setenv(name, value)
    text = (tmp_path / "saf.toml").read_text()
    assert text.count("#") > 50
    assert "dbname" not in text.replace("dbname=…", "")
    settings = load(tmp_path / "saf.toml")
    assert settings.forwarder.default_destination == "mom"
    with connect(Dsn(bare["MOM_DSN"])) as connection:
        assert services.subscriptions(connection) == [], "the one of the first message is gone"
        # and it does not make the first service look as if others were addressed here
        assert services.create_service(connection, "billing")
        assert granted(connection) == {role: ("forwarder",)}


def test_it_overwrites_no_file_and_changes_nothing_then(
    bare: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "saf.toml").write_text("mine")
    done = saf("init", cwd=tmp_path, env=bare)
    assert done.returncode == USAGE
    assert "saf.toml exists and is not overwritten" in done.stderr
    assert (tmp_path / "saf.toml").read_text() == "mine"
    with connect(Dsn(bare["SHOP_DSN"])) as connection:
        assert fetch(connection, "SELECT to_regnamespace('saf') IS NULL") == [(True,)]


def test_where_messages_are_at_work_it_sends_none(app: Dsn, mom: Dsn, tmp_path: Path) -> None:
    with connect(app) as connection:
        send(connection, "pending")
    env = {"SHOP_DSN": app.conninfo, "MOM_DSN": mom.conninfo}
    done = saf("init", cwd=tmp_path, env=env)
    assert done.returncode == DONE, done.stderr
    assert "sent no first message: the outbox of shop is in use" in done.stdout
    assert "unchanged" in done.stdout
    with connect(mom) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.inbox") == [(0,)]


def test_a_dsn_on_the_command_line_is_written_unless_it_holds_a_password(
    bare: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("--source", bare["SHOP_DSN"], "--store", bare["MOM_DSN"])
    done = saf("init", *arguments, cwd=tmp_path)
    assert done.returncode == DONE, done.stderr
    settings = load(tmp_path / "saf.toml")
    assert settings.brokers["shop"].dsn.database == Dsn(bare["SHOP_DSN"]).database
    secret = make_conninfo(bare["SHOP_DSN"], password="canary-77")
    done = saf("init", "--source", secret, "--config", "other.toml", cwd=tmp_path, env=bare)
    assert done.returncode == USAGE
    assert "export it as SHOP_DSN" in done.stderr
    assert "canary-77" not in done.stderr + done.stdout
    assert not (tmp_path / "other.toml").exists()


def test_a_password_in_the_environment_stays_there_in_a_url_of_sqlalchemy_too(
    bare: dict[str, str], tmp_path: Path
) -> None:
    parts = Dsn(bare["SHOP_DSN"]).parts
    place = f"host={quote(parts['host'], safe='')}&port={parts['port']}"
    url = f"postgresql+psycopg://{parts['user']}:canary-77@/{parts['dbname']}?{place}"
    done = saf("init", cwd=tmp_path, env=bare | {"SHOP_DSN": url})
    assert done.returncode == DONE, done.stderr
    assert 'dsn = "${SHOP_DSN}"' in (tmp_path / "saf.toml").read_text()


def test_where_the_file_cannot_be_written_nothing_is_done(
    bare: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.touch(0o777)
    for folder in (tmp_path / "no" / "such", program):
        file = folder / "saf.toml"
        done = saf("init", "--config", file, cwd=tmp_path, env=bare)
        assert done.returncode == USAGE
        assert f"{file} cannot be written: {folder} is not a folder" in done.stderr
    with connect(Dsn(bare["SHOP_DSN"])) as connection:
        assert fetch(connection, "SELECT to_regnamespace('saf') IS NULL") == [(True,)]


def test_a_database_that_is_away_or_the_same_as_the_other_is_named(
    bare: dict[str, str], tmp_path: Path
) -> None:
    away = bare | {"MOM_DSN": "host=/nonexistent dbname=mom"}
    done = saf("init", cwd=tmp_path, env=away)
    assert done.returncode == TRY_AGAIN
    assert "dbname=mom" in done.stderr
    done = saf("init", cwd=tmp_path, env=bare | {"MOM_DSN": bare["SHOP_DSN"]})
    assert done.returncode == USAGE
    assert "both DSNs lead to the same database" in done.stderr
    with connect(Dsn(bare["SHOP_DSN"])) as connection:
        assert fetch(connection, "SELECT to_regnamespace('saf') IS NULL") == [(True,)]
    done = saf("init", "--source", " ", cwd=tmp_path, env=bare)
    assert done.returncode == USAGE
    assert "--source is empty: is the variable set?" in done.stderr
    assert not (tmp_path / "saf.toml").exists()
