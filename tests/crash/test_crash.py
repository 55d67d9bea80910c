"""A short seeded run of the crash rounds; ``make crash`` runs as many as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.crash import faults, rounds
from tests.crash.lake import DeltaSite, IcebergSite
from tests.crash.plan import Fault, plan
from tests.crash.queues import QUEUES
from tests.crash.rounds import Round
from tests.crash.site import Site
from tests.crash.webhooks import WebhookSite

SEED = 7


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


@pytest.fixture(scope="module", params=QUEUES)
def queue_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with QUEUES[request.param]() as site:
        yield site


@pytest.fixture(scope="module", params=[DeltaSite, IcebergSite])
def lake_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with request.param() as site:
        yield site


@pytest.fixture(scope="module")
def webhook_site() -> Iterator[Site]:
    with WebhookSite() as site:
        yield site


@pytest.mark.parametrize("number", range(3))
def test_nothing_is_lost_doubled_or_out_of_order_whatever_fails(site: Site, number: int) -> None:
    outcome = Round(site, plan(SEED, number)).run()
    assert outcome.good, outcome


def test_nor_is_it_with_a_queue_that_is_killed(queue_site: Site) -> None:
    outcome = Round(queue_site, queue_site.plan(SEED, number=0)).run()
    assert outcome.good, outcome


def test_nor_is_it_with_a_table_whose_writers_are_killed(lake_site: Site) -> None:
    outcome = Round(lake_site, lake_site.plan(SEED, number=0)).run()
    assert outcome.good, outcome


@pytest.mark.parametrize("number", range(2))
def test_nor_is_it_on_the_way_to_an_endpoint_that_fails_at_random(
    webhook_site: Site, number: int
) -> None:
    outcome = Round(webhook_site, webhook_site.plan(SEED, number)).run()
    assert outcome.good, outcome


def test_a_round_in_which_nothing_moves_says_what_is_in_the_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "DRAIN_SECONDS", 1)
    lock = "BEGIN; SELECT FROM saf.cursor FOR UPDATE"
    fault = Fault(kind="locked", after=0.5, lasts=0, target=0)
    quiet = replace(plan(SEED, 0), faults=(fault,), dialogs=False, forwarders=1)
    round_ = Round(site, quiet)
    with round_.app.connect(role="a person", autocommit=True) as person:
        monkeypatch.setattr(faults, "locked", lambda *_: person.execute(lock), raising=False)
        outcome = round_.run()
    assert outcome.left > 0
    (holder,) = [line for line in outcome.in_the_way if "a person" in line]
    assert "idle in transaction" in holder
    assert any("tests/crash/forwarders.py" in line for line in outcome.in_the_way)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert [plan(SEED, n) for n in range(20)] == [plan(SEED, n) for n in range(20)]
    assert plan(SEED, 0).faults != plan(SEED + 1, 0).faults
