"""Which values of a log's rows are read, by their size."""

from __future__ import annotations

from psycopg import sql

from saf.log.columns import bounded
from saf.message import MAX_BODY


def test_a_body_is_read_up_to_the_size_that_is_asked_for() -> None:
    for most, size in ((1234, 1234), (None, MAX_BODY)):
        column = bounded("body", most)
        assert isinstance(column, sql.Composable)
        assert f"octet_length(body) <= {size} " in column.as_string()
