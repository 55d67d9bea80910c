"""A look by stretches: whatever transactions there are, and however soon its time is over."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from saf.operating.outbox import NEWEST_FIRST, OLDEST_FIRST, Looked, Order, look

TRANSACTIONS = st.dictionaries(
    st.integers(1, 300), st.lists(st.booleans(), min_size=1, max_size=5), max_size=30
)
"""By transaction: of each of its messages, whether it is wanted."""


@given(
    TRANSACTIONS,
    st.integers(1, 6),
    st.sampled_from([0.0, 1e-5, 60.0]),
    st.sampled_from([OLDEST_FIRST, NEWEST_FIRST]),
)
def test_looks_that_follow_each_other_find_everything_once_and_come_to_an_end(
    sent: dict[int, list[bool]], limit: int, seconds: float, order: Order
) -> None:
    every = [(txid, is_wanted) for txid in sorted(sent) for is_wanted in sent[txid]]
    rows: list[dict[str, Any]] = [
        {"txid": txid, "id": id_} for id_, (txid, is_wanted) in enumerate(every, 1) if is_wanted
    ]
    rows = rows[:: order.step]
    first_id = order.begin[1]
    begin = {"txid": int(order.begin[0]), "id": first_id}
    found, looks = list[dict[str, Any]](), 0

    def following(txid: str) -> tuple[str, datetime] | None:
        later = [one for one in sent if (one - int(txid)) * order.step >= 0]
        if not later:
            return None
        return str(min(later, key=lambda one: one * order.step)), datetime.now(UTC)

    def within(first: str, after: str, most: int) -> list[dict[str, Any]]:
        seen = begin["id"] if int(first) == begin["txid"] else first_id
        bounds = order.stretch(first, after)
        in_stretch = [
            row
            for row in rows
            if int(bounds["first"]) <= row["txid"] < int(bounds["before"])
            and (row["id"] - seen) * order.step > 0
        ]
        return in_stretch[:most]

    def once() -> Looked:
        return look(
            following,
            within,
            txid=str(begin["txid"]),
            limit=limit,
            seconds=seconds,
            step=order.step,
        )

    while (looked := once()).place is not None or len(looked.rows) == limit:
        found += looked.rows
        looks += 1
        begin = found[-1] if looked.place is None else {"txid": int(looked.place), "id": first_id}
        assert looks <= len(rows) + len(sent), "each look comes further"
    assert [*found, *looked.rows] == rows
    assert looks <= len(rows) // limit or seconds < 1
