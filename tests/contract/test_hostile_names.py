"""Names and values are data: whatever they hold, they arrive as they were, and nothing else moves.

Quotes, SQL, placeholders of every library on the way, control characters, text that looks alike or
turns around, and names longer than PostgreSQL's own: as message, route, destination, broker,
subscription, member, database, role and application.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf import Message, Outbox
from saf.broker.embedded import EmbeddedServer
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.config import load
from saf.database import Dsn, fetch
from saf.log.shards import Member
from saf.message import MAX_KEY, MAX_NAME
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, send
from tests.programs import saf

HOSTILE = [
    *("'", '"', "\\", "''", '""', "\\'", "$$", "$1", "?", ";", "--", "/*", "`", ","),
    *("%", "%%", "%s", "%(name)s", ":name", "::text", "{x}", "{}", "{0}", "${X}", "{1,2}"),
    "'; DROP TABLE saf.outbox; --",
    '"; DROP SCHEMA saf CASCADE; --',
    "'); DELETE FROM saf.cursor; SELECT ('",
    *("NULL", "null", "\\N", "\\.", "\\x00", "\\u0000", "true", "0", "[/]", "[red]", ":smile:"),
    *(" ", " both ends ", "\t", "a\nb\r\nc", "\n", "\x01\x7f", "\x1b[31mred\x1b[0m"),
    *("é", "e\u0301", "ﬁ", "\u212b", "\xa0", "\u200b", "\ufeff", "\uffff", "\u202eabc\u202c"),
    *("שלום", "👩‍👩‍👧‍👦", "\U0010ffff", "\U0001d4b3"),
    *("n" * 63, "n" * 64, "ü" * 32, "😀" * 16, "long " * 51),
]

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def cut(longest: int, text: str) -> str:
    """As much of a text as has so many bytes."""
    return text.encode()[:longest].decode(errors="ignore")


MESSAGES = st.lists(
    st.tuples(TEXT.map(partial(cut, MAX_NAME)), TEXT.map(partial(cut, MAX_KEY))),
    min_size=1,
    max_size=20,
)

ARRIVED = """
SELECT to_service, from_service, key, message_type, headers - 'content-type', body
FROM saf.inbox ORDER BY id
"""


def full(service: str, key: str) -> Message:
    """A message each of whose texts is one of the two."""
    return Message(
        service=service,
        from_service=service,
        message_type=service,
        key=key,
        headers={service: key, "nested": {key: [service]}},
        body=key,
    )


def as_row(message: Message) -> tuple[Any, ...]:
    return (
        message.service,
        message.from_service,
        message.key,
        message.message_type,
        message.headers,
        str(message.body).encode(),
    )


def send_each_way(app: Dsn, messages: list[Message]) -> None:
    """Once with psycopg and once with SQLAlchemy, one by one and all together."""
    outbox = Outbox()
    engine = app.engine()
    with app.connect(role="test") as connection, engine.begin() as alchemy:
        conn: Any
        for conn in (connection, alchemy):
            outbox.send_many(conn, messages)
            for m in messages:
                outbox.send(
                    conn,
                    m.service,
                    m.body,
                    key=m.key,
                    headers=m.headers,
                    message_type=m.message_type,
                    from_service=m.from_service,
                )
    engine.dispose()


def arrived(mom: Dsn) -> list[tuple[Any, ...]]:
    with connect(mom) as connection:
        return fetch(connection, ARRIVED)


def ordered(rows: list[tuple[Any, ...]]) -> list[str]:
    return sorted(json.dumps(row, default=bytes.hex, sort_keys=True) for row in rows)


@pytest.mark.every_postgresql
def test_every_text_of_a_message_arrives_byte_for_byte(app: Dsn, mom: Dsn) -> None:
    messages = [full(text, text) for text in HOSTILE]
    send_each_way(app, messages)
    forward(app, mom=mom)
    assert ordered(arrived(mom)) == ordered([as_row(message) for message in messages * 4])


@pytest.mark.slow
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=MESSAGES)
def test_any_text_arrives_byte_for_byte(app: Dsn, mom: Dsn, texts: list[tuple[str, str]]) -> None:
    messages = [full(service, key) for service, key in texts]
    before = len(arrived(mom))
    send_each_way(app, messages)
    forward(app, mom=mom)
    assert ordered(arrived(mom)[before:]) == ordered([as_row(m) for m in messages * 4])


@pytest.mark.slow
def test_routes_destinations_and_brokers_may_have_any_name(app: Dsn, mom: Dsn) -> None:
    outbox = Outbox()
    sent = []
    for text in HOSTILE[::5]:
        with app.connect(role="test") as connection:
            connection.execute("DELETE FROM saf.route")
            for service in HOSTILE:
                connection.execute(
                    "INSERT INTO saf.route (service, destination) VALUES (%s, %s)", [service, text]
                )
                outbox.send(connection, service, service, key="k")
        destinations: dict[str, Any] = {"nowhere": app, text: mom}
        with Cycle(app, forwarding_rules(**destinations)) as cycle:
            cycle.broker.name = text
            cycle.run()
        sent += HOSTILE
        assert bodies(mom) == sent, text


def test_a_name_that_only_looks_like_a_routes_takes_another_way(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('é', 'nowhere'), ('%', 'nowhere')"
        )
        for service in ("e\u0301", "É", "é ", "%%", "_"):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, body) VALUES (%s, %s)",
                [service, service.encode()],
            )
    forward(app, mom=mom)
    assert sorted(bodies(mom)) == sorted(["e\u0301", "É", "é ", "%%", "_"])


def test_subscriptions_and_members_may_have_any_name(app: Dsn) -> None:
    with connect(app) as connection:
        for text in HOSTILE:
            ((subscription_id,),) = fetch(
                connection,
                "INSERT INTO saf.subscription (name, log) VALUES (%(name)s, 'inbox') "
                "RETURNING subscription_id",
                {"name": text},
            )
            member = Member(subscription_id=subscription_id, lease_seconds=30, name=text)
            member.join(connection)
            member.balance(connection)
        named = "SELECT s.name, m.name FROM saf.subscription s JOIN saf.member m USING ({})"
        rows = fetch(connection, named.format("subscription_id") + " ORDER BY subscription_id")
    assert rows == [(text, text) for text in HOSTILE]


@pytest.mark.parametrize(
    "name",
    [
        "it's",
        'a "quoted" name',
        "back\\slash",
        "100% %s %(x)s",
        "{x} ${X} :x",
        "dbname=postgres host=elsewhere",
        "postgresql://elsewhere",
        "'; DROP TABLE saf.outbox; --",
        "Zürich 👩‍👧",
    ],
)
def test_a_database_may_have_any_name(
    name: str, server: EmbeddedServer, new_database: Callable[[str], Dsn], mom: Dsn
) -> None:
    database = new_database(name)
    migrate(database)
    migrate(database)
    send_each_way(database, [full("billing", "k")])
    forward(database, mom=mom)
    assert len(arrived(mom)) == 4
    # and as a destination
    with connect(mom) as connection:
        send(connection, "back")
    forward(mom, mom=database)
    assert bodies(database) == ["back"]
    with connect(database) as connection:
        found = fetch(connection, "SELECT name, current_database() FROM saf.broker")
    assert found == [(database.database, database.database)]
    assert Dsn(str(database)).parts == server.dsn(database.database).parts


@pytest.mark.full
@pytest.mark.slow
def test_roles_and_applications_may_have_any_name(app: Dsn, mom: Dsn) -> None:
    names = [text for text in HOSTILE if len(text.encode()) < 64]
    with connect(app) as connection:
        for name in names:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    try:
        for number, name in enumerate(names):
            for dsn in (app, mom):
                with connect(dsn) as connection:
                    grant(connection, name, [Kind.FORWARDER, Kind.WRITER])
            source, destination = _as(app, name), _as(mom, name)
            with source.connect(role="test") as connection:
                Outbox().send(connection, "billing", name, key="k")
                assert fetch(connection, "SELECT session_user::text") == [(name,)]
            if number % 5 == 0:
                forward(source, mom=destination)
        forward(app, mom=mom)
        assert bodies(mom) == names
    finally:
        for dsn in (app, mom):
            with connect(dsn) as connection:
                for name in names:
                    connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        with connect(app) as connection:
            for name in names:
                connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.mark.slow
def test_brokers_and_destinations_in_saf_toml_may_have_any_printable_name(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    names = [text for text in HOSTILE if text.isprintable()]
    lines = [
        f"[{kind}.{json.dumps(name, ensure_ascii=False)}]\ndsn = {json.dumps(dsn.conninfo)}"
        for name in names
        for kind, dsn in (("brokers", app), ("destinations", mom))
    ]
    (tmp_path / "saf.toml").write_text("\n".join(lines))
    settings = load(tmp_path / "saf.toml")
    assert list(settings.brokers) == list(settings.destinations) == names
    done = saf("status", "--json", cwd=tmp_path)
    assert [broker["broker"] for broker in json.loads(done.stdout)["brokers"]] == names
    table = saf("status", "--shards", cwd=tmp_path, env={"COLUMNS": "400"})
    assert table.returncode == 0, table.stderr
    assert [name for name in names if name.strip() not in table.stdout] == []


def _as(dsn: Dsn, name: str) -> Dsn:
    return Dsn(make_conninfo(dsn.conninfo, user=name, application_name=name))
