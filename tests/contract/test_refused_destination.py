"""A destination that a person has to mend holds up nobody else's messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.database import Dsn, fetch
from tests.destinations import route, send_to
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass, run

ROLE = "CREATE ROLE saf_no_right LOGIN; GRANT USAGE ON SCHEMA saf TO saf_no_right"
BROKEN = {
    "refuses this user": ROLE,
    "is read-only": "ALTER DATABASE {} SET default_transaction_read_only = on",
    "is incomplete": "ALTER TABLE saf.watermark RENAME TO gone",
    "has no saf schema": "ALTER SCHEMA saf RENAME TO gone",
    "has saf schema 0001": "UPDATE saf.alembic_version SET version_num = '0001'",
}
WHOLE_AGAIN = {
    "is read-only": "SET TRANSACTION READ WRITE; "
    "ALTER DATABASE {} SET default_transaction_read_only = off",
    "is incomplete": "ALTER TABLE saf.gone RENAME TO watermark",
    "has no saf schema": "ALTER SCHEMA gone RENAME TO saf",
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_destination_that_a_person_has_to_mend_holds_up_no_other(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn], why: str
) -> None:
    other = new_broker("other")
    name = sql.Identifier(other.database)
    with connect(app) as source:
        for service, destination in (("billing", "mom"), ("shipping", "other")):
            route(source, service, destination)
            send_to(source, service, f"for {destination}")
    with connect(other) as connection:
        connection.execute(sql.SQL(BROKEN[why]).format(name))
    there = other
    if why == "refuses this user":
        there = Dsn(make_conninfo(other.conninfo, user="saf_no_right"))
    try:
        with Cycle(app, forwarding_rules(mom=mom, other=there)) as cycle:
            receipts = cycle.run()
        assert bodies(mom) == ["for mom"]
        (said,) = [receipt.error for receipt in receipts if receipt.error]
        assert why in said
        with connect(app) as source:
            assert [why in error for (error,) in fetch(source, "SELECT error FROM saf.backoff")]
        if why in WHOLE_AGAIN:
            with connect(other) as connection:
                connection.execute(sql.SQL(WHOLE_AGAIN[why]).format(name))
            let_time_pass(app)
            run(app, mom=mom, other=other)
            assert bodies(other) == ["for other"]
    finally:
        if why == "refuses this user":
            with connect(other) as connection:
                connection.execute("DROP OWNED BY saf_no_right; DROP ROLE saf_no_right")
