"""Who may only send cannot say what is the database's to say; where it was said, it is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from saf import Outbox
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.config import Broker, Settings
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.errors import ConfigurationError
from saf.operating.doctor import Finding, examine
from tests.pipeline import bodies, connect, forward, let_time_pass, send

LATER = "pg_snapshot_xmax(pg_current_snapshot())::text::numeric + 1000000"
FORGE = """
INSERT INTO saf.{log} (txid, to_service, body)
SELECT ({number})::text::xid8, 'billing', 'forged'
"""


@pytest.fixture
def writer(app: Dsn) -> Iterator[Dsn]:
    with connect(app) as connection:
        connection.execute("CREATE ROLE only_a_writer LOGIN")
        grant(connection, "only_a_writer", [Kind.WRITER])
        yield Dsn(make_conninfo(app.conninfo, user="only_a_writer"))
        connection.execute("DROP OWNED BY only_a_writer")
        connection.execute("DROP ROLE only_a_writer")


def forged(app: Dsn) -> list[Finding]:
    settings = Settings(brokers={"a": Broker(dsn=app)}, destinations={"m": Postgresql(dsn=app)})
    found = examine(settings)
    mine = [one for one in found if one.check == "forged" and one.where == "broker 'a'"]
    assert mine, "the check was not made"
    return [one for one in mine if one.severity == "error"]


@pytest.mark.every_postgresql
@pytest.mark.parametrize("column", ["txid", "id", "created_at", "shard", "conversation_id"])
def test_a_writer_s_rights_are_for_what_a_sender_says_only(writer: Dsn, column: str) -> None:
    with connect(writer) as connection:
        Outbox(allow_autocommit=True).send(connection, "billing", b"one", key="k")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', 'two')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(
                f"INSERT INTO saf.outbox ({column}, to_service, body) "
                "OVERRIDING SYSTEM VALUE VALUES (DEFAULT, 'billing', 'three')"
            )


@pytest.fixture
def grouped(new_database: Callable[[str], Dsn]) -> Iterator[tuple[Dsn, str]]:
    """A broker whose tables were created while default privileges let a group write; a member."""
    app = new_database("grouped")
    group = f"group_{app.database}"
    with connect(app) as owner:
        owner.execute(f"CREATE ROLE {group}; CREATE ROLE {group}_member LOGIN IN ROLE {group}")
        owner.execute(f"ALTER DEFAULT PRIVILEGES GRANT INSERT ON TABLES TO {group}")
        owner.execute(f"ALTER DEFAULT PRIVILEGES GRANT USAGE ON SCHEMAS TO {group}")
        migrate(app)
        yield app, group
        owner.execute(f"DROP OWNED BY {group}, {group}_member; DROP ROLE {group}_member, {group}")


@pytest.mark.every_postgresql
def test_a_writer_has_no_more_rights_by_a_group_and_its_default_privileges(
    grouped: tuple[Dsn, str],
) -> None:
    app, group = grouped
    member = f"{group}_member"

    def groups() -> list[Finding]:
        settings = Settings(brokers={"a": Broker(dsn=app)}, destinations={"m": Postgresql(dsn=app)})
        return [
            one
            for one in examine(settings)
            if one.check == "forgers" and one.where == "broker 'a'" and one.what
        ]

    with connect(app) as owner:
        with pytest.raises(ConfigurationError, match=rf"by the rights of {group}: as the owner"):
            grant(owner, member, [Kind.WRITER])
        (one,) = groups()
        assert f"{group} and its members may write any column of saf.inbox" in one.what
        owner.execute(one.cure.removeprefix("as the owner, ").partition(", run `saf grant`")[0])
        assert groups() == []
        grant(owner, member, [Kind.WRITER])
    with connect(Dsn(make_conninfo(app.conninfo, user=member))) as writer:
        Outbox(allow_autocommit=True).send(writer, "billing", b"one")
        for log in ("outbox", "outbox_0", "inbox"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                writer.execute(FORGE.format(log=log, number=LATER))


@pytest.mark.every_postgresql
@pytest.mark.parametrize("log", ["outbox", "inbox"])
@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_transaction_that_there_cannot_be_is_refused(app: Dsn, log: str, number: int) -> None:
    with connect(app) as connection, pytest.raises(psycopg.errors.CheckViolation) as refused:
        connection.execute(FORGE.format(log=log, number=number))
    assert refused.value.diag.constraint_name == f"{log}_possible"


def test_a_transaction_that_is_still_to_come_is_found_with_the_command_that_mends_it(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        assert forged(app) == []
        connection.execute(FORGE.format(log="outbox", number=LATER))
        send(connection, "true")
        forward(app, mom=mom)
        assert bodies(mom) == ["true"]
        (error,) = forged(app)
        assert error.what.startswith("the outbox has 1 message, the first with id 1,")
        command = error.cure.removeprefix("as the owner, ").partition(", and revoke INSERT")[0]
        connection.execute(command)
    assert forged(app) == []
    let_time_pass(app)
    forward(app, mom=mom)
    assert bodies(mom) == ["true", "forged"]
