"""However many messages wait for their deliver_at, to ask for the first one reads one."""

from __future__ import annotations

import pytest

from saf.database import Dsn, fetch
from saf.receiving import retries
from tests.pipeline import connect
from tests.query_plans import steps

MANY = 20_000

PARK = """
INSERT INTO saf.parked (subscription_id, kind, subject, shard, id, batch, position, to_service,
                        body, deliver_at)
SELECT subscription_id, 'later', (n %% 2)::text, n %% 2, n, 1, 1, 's', '',
       now() + make_interval(secs => 1 + n)
FROM saf.subscription, generate_series(1, %s) AS n WHERE name = 'forwarder'
"""


@pytest.mark.every_postgresql
def test_when_the_first_of_many_is_due_is_read_from_one_of_them(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(PARK, [MANY])
        connection.execute("ANALYZE saf.parked")
        ((number,),) = fetch(connection, "SELECT subscription_id FROM saf.subscription")
        params = {"subscription_id": number, "subjects": ["0", "1", "2"]}
        explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {retries.TIME_LATE}"
        (((plan,),),) = fetch(connection, explain, params)
        read = [one for one in steps(plan["Plan"]) if one.get("Index Name") == "parked_later"]
        assert read, plan
        assert all(one["Actual Rows"] <= 1 for one in read)
        first = "SELECT subject, next_attempt_at - now() < '1 min' FROM saf.backoff ORDER BY 1"
        assert fetch(connection, first) == [("0", True), ("1", True)]

        forget = f"EXPLAIN (ANALYZE, FORMAT JSON) {retries.FORGET_LATE}"
        (((plan,),),) = fetch(connection, forget, params)
        rows = [one for one in steps(plan["Plan"]) if one.get("Relation Name") == "parked"]
        assert all(one["Actual Rows"] <= 1 for one in rows), plan
