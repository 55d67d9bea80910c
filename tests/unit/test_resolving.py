"""Resolving: for any routers, a chunk is resolved as each of its messages would be, one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.engine.classifying import as_answers
from saf.engine.resolving import Mask, Matcher, Resolver
from saf.message import MAX_HOPS
from saf.routing.matching import KEY, MESSAGE, PYTHON, SQL, Route, Router, Routes
from saf.routing.resolved import Resolved

ROUTERS = ["a", "b", "c"]
SERVICES = ["x", "y"]
UNROUTED = "nowhere"

Said = Mapping[str, str | None]


class Row(NamedTuple):
    service: str
    key: str | None
    body: str


class Memory(dict[tuple[str, str], Resolved]):
    """What a table remembers."""

    def resolved(self, router: str, keys: Collection[str]) -> dict[str, Resolved]:
        return {key: self[router, key] for key in keys if (router, key) in self}

    def keep(self, router: str, new: Mapping[str, Resolved]) -> dict[str, Resolved]:
        for key, one in new.items():
            self.setdefault((router, key), one)
        return self.resolved(router, new)


answers = st.dictionaries(
    st.sampled_from([f"{router}{body}" for router in ROUTERS for body in "12"]),
    st.none() | st.sampled_from([*ROUTERS, *SERVICES, UNROUTED]),
)
rows = st.lists(
    st.builds(
        Row,
        st.sampled_from([*ROUTERS, *SERVICES]),
        st.none() | st.sampled_from("pq"),
        st.sampled_from("12"),
    ),
    min_size=1,
)
once = st.tuples(*[st.sampled_from([MESSAGE, KEY])] * len(ROUTERS))


def as_table(some: list[Row]) -> pa.Table:
    count = len(some)
    return pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            "to_service": [row.service for row in some],
            "to_broker": pa.nulls(count, pa.binary()),
            "key": pa.array([row.key for row in some], pa.string()),
            "conversation_id": pa.nulls(count, pa.binary()),
            "from_initiator": pa.nulls(count, pa.bool_()),
            "body": [row.body for row in some],
        }
    )


def one_by_one(some: list[Row], said: Said, once_per: Mapping[str, str]) -> dict[int, str]:
    """What each message that can be is resolved to, a hop of all at a time."""
    known: dict[tuple[str, str], str] = {}
    trails = {number: [row.service] for number, row in enumerate(some)}
    for _ in range(MAX_HOPS):
        for number, trail in list(trails.items()):
            row, service = some[number], trail[-1]
            if service not in ROUTERS:
                continue
            place = (service, row.key or "")
            remembered = row.key is not None and once_per[service] == KEY
            answer = (known.get(place) if remembered else None) or said.get(service + row.body)
            if answer is None or answer == UNROUTED:
                del trails[number]
                continue
            if remembered:
                known[place] = answer
            if answer in trail:
                del trails[number]
            trail.append(answer)
    return {number: trail[-1] for number, trail in trails.items()}


@given(rows, answers, once)
def test_a_chunk_is_resolved_as_its_messages_would_be_one_by_one(
    some: list[Row], said: Said, once: tuple[str, ...]
) -> None:
    def classify(router: Router, mine: pa.Table) -> pa.Table:
        named = [said.get(router.service + body) for body in mine["body"].to_pylist()]
        return as_answers([Resolved(service=one) if one else "nothing" for one in named])

    once_per = dict(zip(ROUTERS, once, strict=True))
    routers = [
        Router(service=name, kind=PYTHON, expression="m:f", once_per=once_per[name])
        for name in ROUTERS
    ]
    routes = Routes(routes=tuple(Route(service=name, destination="mom") for name in SERVICES))
    resolver = Resolver(routers, Matcher(routes), Memory())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolver, "_asked", classify)
        resolution = resolver.resolve(as_table(some))
    found = resolution.rows.select(["id", "to_service"]).to_pylist()
    assert [row["id"] for row in found] == sorted(row["id"] for row in found)
    assert {row["id"]: row["to_service"] for row in found} == one_by_one(some, said, once_per)
    dead = [number for letters, _ in resolution.dead for number in letters["id"].to_pylist()]
    assert sorted([*dead, *(row["id"] for row in found)]) == list(range(len(some)))


def test_a_router_that_cannot_be_asked_says_its_own_problem() -> None:
    """Also one in SQL, without the Spark that it needs."""
    routers = [
        Router(service="a", kind=SQL, expression="x", problem="its expression is refused"),
        Router(service="b", kind=SQL, expression="x"),
    ]
    resolver = Resolver(routers, Matcher(Routes(routes=())), Memory())
    waiting = resolver.resolve(as_table([Row("a", None, ""), Row("b", None, "")])).waiting
    assert waiting is not None
    assert waiting["to_service"].to_pylist() == ["a", "b"]
    assert resolver.problems == {
        "a": "its expression is refused",
        "b": "router 'b' is in SQL, which needs Spark",
    }


def test_a_router_in_sql_gets_its_answers_from_spark() -> None:
    class Spark:
        def about(self, rows: pa.Table) -> Mask:
            return np.ones(rows.num_rows, np.bool_)

        def to(self, router: Router, rows: pa.Table) -> pa.Table:
            assert router.service == "a"
            return as_answers([Resolved(service=body) for body in rows["body"].to_pylist()])

    routes = Routes(routes=(Route(service="x", destination="mom"),))
    routers = [Router(service="a", kind=SQL, expression="body")]
    resolver = Resolver(routers, Matcher(routes), Memory(), Spark())
    resolution = resolver.resolve(as_table([Row("a", None, "x"), Row("y", None, "")]))
    assert resolution.rows["to_service"].to_pylist() == ["x", "y"]


def test_a_message_without_a_key_is_asked_about_beside_those_whose_keys_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = Routes(routes=tuple(Route(service=name, destination="mom") for name in SERVICES))
    routers = [Router(service="a", kind=PYTHON, expression="m:f", once_per=KEY)]
    memory = Memory({("a", key): Resolved(service=name) for key, name in ("px", "qy")})
    resolver = Resolver(routers, Matcher(routes), memory)
    to_x = lambda _, rows: as_answers([Resolved(service="x")] * len(rows))  # noqa: E731
    monkeypatch.setattr(resolver, "_asked", to_x)
    resolution = resolver.resolve(as_table([Row("a", key, "") for key in ("p", "q", None)]))
    assert resolution.rows["to_service"].to_pylist() == ["x", "y", "x"]
