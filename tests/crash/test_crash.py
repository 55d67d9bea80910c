"""A short seeded run of the crash rounds; ``make crash`` runs as many as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from saf.database import fetch
from tests.crash import bugs, faults, rounds
from tests.crash.lake import DeltaSite, IcebergSite
from tests.crash.plan import CLOCKS, HELD, MOVES, QUALITIES, Fault, Plan, plan
from tests.crash.queues import QUEUES
from tests.crash.rounds import Round
from tests.crash.shrink import as_test, shows_again, shrink
from tests.crash.site import Site
from tests.crash.sources import OF_READERS, SOURCES
from tests.crash.webhooks import WebhookSite
from tests.tiers import sized
from tests.waits import until

SEED = 7


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


IN_GATE = ("redis", "kafka", "rabbitmq_stream")
"""The queues of the gate: with a function, with transactions, and with no fence."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[] if one in IN_GATE else pytest.mark.full) for one in QUEUES],
)
def queue_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with QUEUES[request.param]() as site:
        yield site


@pytest.fixture(
    scope="module", params=[DeltaSite, pytest.param(IcebergSite, marks=pytest.mark.full)]
)
def lake_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with request.param() as site:
        yield site


@pytest.fixture(scope="module")
def webhook_site() -> Iterator[Site]:
    with WebhookSite() as site:
        yield site


@pytest.mark.parametrize("number", range(sized(1, 3)))
def test_nothing_is_lost_doubled_or_out_of_order_whatever_fails(site: Site, number: int) -> None:
    outcome = Round(site, plan(SEED, number)).run()
    assert outcome.good, outcome


EVERYBODY = {"dialogs": True, "hubs": 1, "consumers": True, "hostile": True, "pooled": True}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("set_back_source", marks=pytest.mark.full),
        pytest.param("restore_source", marks=pytest.mark.full),
        "set_back_mom",
    ],
)
def test_nor_is_it_after_a_set_back_which_is_refused_and_repaired(site: Site, kind: str) -> None:
    """With everybody who is there in some rounds only; in one of them, to save time."""
    more = EVERYBODY if kind == "set_back_source" else {}
    fault = Fault(kind=kind, after=0.5, lasts=0.5, target=0)
    made = replace(plan(SEED, 0), faults=(fault,), purge=False, mortal=0.02)
    outcome = Round(site, replace(made, **more)).run()  # type: ignore[arg-type]
    assert outcome.good, outcome


@pytest.mark.full
@pytest.mark.parametrize("kind", [*CLOCKS, *MOVES])
def test_nor_is_it_after_a_clock_went_back_or_a_move(site: Site, kind: str) -> None:
    fault = Fault(kind=kind, after=0.5, lasts=0.5, target=0)
    made = replace(plan(SEED, 0), faults=(fault,), purge=False, mortal=0.02)
    outcome = Round(site, made).run()
    assert outcome.good, outcome


@pytest.mark.full
def test_a_finding_is_reduced_to_the_fewest_faults_people_and_messages(site: Site) -> None:
    faults = plan(SEED, 1).faults[:1]
    made = replace(plan(SEED, 1), faults=faults, writers=2, forwarders=1, poison=0.0)
    made = replace(made, transactions=2, destinations=1, purge=False, skewed=False)
    bug = bugs.watermark_moved_and_a_row_not_stored.__name__
    smallest = shrink(made, shows_again(site, {"lost"}, bug))
    assert (smallest.faults, smallest.writers) == ((), 1)
    test = as_test(smallest, {"lost"}, "mom")
    names: dict[str, Plan] = {}
    exec(test, {"Plan": Plan, "Fault": Fault}, names)  # noqa: S102 - it is to be run
    assert names["PLAN"] == smallest


@pytest.mark.full
def test_nor_is_it_with_a_queue_that_is_killed(queue_site: Site) -> None:
    outcome = Round(queue_site, queue_site.plan(SEED, number=0)).run()
    assert outcome.good, outcome


@pytest.mark.full
@pytest.mark.parametrize("kind", SOURCES)
def test_nor_is_it_from_a_queue_into_an_inbox(kind: str) -> None:
    with SOURCES[kind]() as site:
        for number in range(sized(1, 3)):
            outcome = Round(site, site.plan(SEED, number)).run()
            assert outcome.good, outcome


@pytest.mark.full
def test_a_reader_that_reads_without_its_mark_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = Fault(kind="forget_marks", after=1.0, lasts=0.0, target=0)
    forget = "DELETE FROM saf.watermark; UPDATE saf.source_shard SET start_batch = 0, added = 0"

    def forget_marks(round_: Round, _: Fault) -> None:
        with round_.stores["mom"].connect(role="crash", autocommit=True) as connection:
            until(lambda: bool(fetch(connection, "SELECT FROM saf.inbox LIMIT 1")))
            connection.execute(forget)
        for target in range(len(round_.others)):
            round_.again(round_.others, target)

    monkeypatch.setitem(OF_READERS, "forget_marks", forget_marks)
    monkeypatch.setattr(rounds, "DRAIN_SECONDS", 10)
    with SOURCES["redis"]() as site:
        made = replace(site.plan(SEED, 1), faults=(kill,))
        outcome = Round(site, made).run()
        assert "duplicated" in outcome.findings, outcome


@pytest.mark.full
def test_nor_is_it_with_a_table_whose_writers_are_killed(lake_site: Site) -> None:
    outcome = Round(lake_site, lake_site.plan(SEED, number=0)).run()
    assert outcome.good, outcome


@pytest.mark.full
def test_nor_is_it_with_a_table_that_is_set_back_refused_and_repaired(lake_site: Site) -> None:
    fault = Fault(kind="set_back_table", after=1, lasts=1, target=0)
    outcome = Round(lake_site, replace(lake_site.plan(SEED, 0), faults=(fault,), purge=False)).run()
    assert outcome.good, outcome


@pytest.mark.full
@pytest.mark.parametrize("number", range(sized(1, 2)))
def test_nor_is_it_on_the_way_to_an_endpoint_that_fails_at_random(
    webhook_site: Site, number: int
) -> None:
    outcome = Round(webhook_site, webhook_site.plan(SEED, number)).run()
    assert outcome.good, outcome


@pytest.mark.full
def test_nor_is_it_where_forwarders_transform_and_are_killed_as_they_store(site: Site) -> None:
    faults = tuple(Fault(kind=HELD, after=0.5, lasts=0.5, target=target) for target in (0, 1))
    made = replace(plan(SEED, 1), transforms=tuple(QUALITIES), faults=faults)
    outcome = Round(site, made).run()
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

        def locked(*_: object) -> None:
            person.execute(lock)
            ((sent,),) = fetch(person, "SELECT count(*) FROM sent")
            round_.wait_for(f"SELECT FROM sent OFFSET {sent} LIMIT 1", 60)

        monkeypatch.setattr(faults, "locked", locked, raising=False)
        outcome = round_.run()
    assert outcome.left > 0
    (holder,) = [line for line in outcome.in_the_way if "a person" in line]
    assert "idle in transaction" in holder
    assert any("tests/crash/forwarders.py" in line for line in outcome.in_the_way)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert [plan(SEED, n) for n in range(20)] == [plan(SEED, n) for n in range(20)]
    assert plan(SEED, 0).faults != plan(SEED + 1, 0).faults
