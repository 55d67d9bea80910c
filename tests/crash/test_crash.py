"""A short seeded run of the crash rounds; ``make crash`` runs as many as one likes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.plan import plan
from tests.crash.rounds import Round
from tests.crash.site import Site

SEED = 7


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


@pytest.mark.parametrize("number", range(3))
def test_nothing_is_lost_doubled_or_out_of_order_whatever_fails(site: Site, number: int) -> None:
    outcome = Round(site, plan(SEED, number)).run()
    assert outcome.good, outcome


def test_the_same_seed_gives_the_same_plan() -> None:
    assert [plan(SEED, n) for n in range(20)] == [plan(SEED, n) for n in range(20)]
    assert plan(SEED, 0).faults != plan(SEED + 1, 0).faults
