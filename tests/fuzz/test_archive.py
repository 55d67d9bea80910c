"""What strangers write is in the archive as it was in the log, to the last byte."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saf.database import Dsn, fetch
from saf.log.archive import ParquetArchive
from saf.log.ring import Contents, Slot
from tests.pipeline import connect
from tests.tiers import sized

EXAMPLES = sized(25, 2_000)
# of PostgreSQL: no NUL in a text, and no half of a pair
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(10**400)
parts = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
headers = st.dictionaries(texts, parts, max_size=3).map(json.dumps)
rows = st.lists(
    st.tuples(texts.filter(bool), texts | st.none(), headers, st.binary(max_size=200)),
    min_size=1,
    max_size=8,
)
STORE = """
INSERT INTO saf.outbox (to_service, key, headers, body)
SELECT * FROM unnest(%s::text[], %s::text[], %s::jsonb[], %s::bytea[])
"""
READ = "SELECT id, txid::text::bigint, to_service, key, headers::text, body FROM saf.outbox_0"
EXTENT = "SELECT min(id), max(id), count(*) FROM saf.outbox_0"


@pytest.mark.slow
def test_an_archived_slot_has_what_was_in_it(app: Dsn) -> None:
    @given(rows)
    @settings(max_examples=EXAMPLES, deadline=None)
    def check(some: list[tuple[str, str | None, str, bytes]]) -> None:
        with connect(app) as connection, TemporaryDirectory() as folder:
            connection.execute("TRUNCATE saf.outbox")
            connection.execute("ALTER SEQUENCE saf.outbox_id_seq RESTART")
            connection.execute(STORE, [list(column) for column in zip(*some, strict=True)])
            stored = sorted(fetch(connection, READ))
            file = archived(app, Path(folder), fetch(connection, EXTENT)[0])
            assert read(file) == [(*one[:5], bytes(one[5])) for one in stored]

    check()


def archived(app: Dsn, folder: Path, extent: tuple[Any, ...]) -> Path | None:
    first, last, count = extent
    contents = Contents(
        slot=Slot(log="outbox", number=0, state="purged"),
        snapshot="",
        messages=count,
        first_id=first,
        last_id=last,
        age_seconds=None,
    )
    return ParquetArchive(app, folder)(contents)


def read(file: Path | None) -> list[tuple[Any, ...]]:
    assert file is not None
    table = pq.read_table(file)
    names = ("id", "txid", "to_service", "key", "headers", "body")
    return sorted(zip(*(table[name].to_pylist() for name in names), strict=True))
