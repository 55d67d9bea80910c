"""A backup restored over its database without --clean: each row of the logs exists twice."""

from __future__ import annotations

import pytest

import saf
from saf import Restored, UsageError
from saf.config import Broker, Settings
from saf.database import Dsn, fetch
from saf.destinations.postgresql import Postgresql
from saf.operating.doctor import examine
from saf.operating.repair.rebase import rebase
from saf.operating.repair.reconcile import missing, reconcile
from saf.operating.repair.replay import replay
from saf.routing.matching import Route, Routes
from tests.moves import ways
from tests.moves.conftest import Site
from tests.moves.ways import arrived, repair, send_numbers
from tests.pipeline import Cycle, connect, forwarding_rules, run, stores
from tests.receivers import SUBSCRIPTION, double, prepare, put

ROUTES = Routes(routes=(Route(destination="mom"),))


@pytest.fixture
def restored_over(site: Site) -> Site:
    """Of twenty messages, five were pending at the backup, and two more since."""
    send_numbers(site.app, *range(15))
    run(site.app, mom=site.mom)
    send_numbers(site.app, *range(15, 20))
    dumped = ways.dump(site.old, site.app)
    run(site.app, mom=site.mom)
    send_numbers(site.app, 20, 21)
    command = ("pg_restore", "--no-owner", "-d", site.app.conninfo)
    done = ways.attempt(site.old, *command, given=dumped)
    assert b"already exists" in done.stderr
    return site


def compared(app: Dsn, mom: Dsn) -> dict[str, int]:
    there = stores(mom=mom)
    counts = reconcile("app", app, there, retention_seconds=3600).counts
    return {kind: count for kind, count in counts.items() if count}


def test_it_is_seen_and_nothing_that_is_stored_is_called_lost_or_sent_again(
    restored_over: Site,
) -> None:
    app, mom = restored_over.app, restored_over.mom
    assert compared(app, mom) == {"doubled": 20}
    assert missing("app", app, stores(mom=mom), retention_seconds=3600) == []
    settings = Settings(brokers={"a": Broker(dsn=app)}, destinations={"mom": Postgresql(dsn=mom)})
    found = [one for one in examine(settings) if one.check == "restored" and one.what]
    assert {(one.where, one.cure) for one in found} == {("broker 'a'", "saf rebase")}
    assert any("20 messages twice" in one.what for one in found)
    with connect(app) as connection:
        places = fetch(connection, "SELECT DISTINCT shard, id FROM saf.outbox")
        with pytest.raises(UsageError, match=r"42 messages stand where 22 are lost.*saf rebase"):
            replay(connection, places, ROUTES, "")
    with pytest.raises(Restored, match=r"twice.*saf rebase"):
        run(app, mom=mom)
    repair(app, mom)
    run(app, mom=mom)
    assert arrived(mom) == list(range(22))
    assert compared(app, mom) == {}


def test_messages_that_were_pending_then_and_now_are_not_stored_twice(site: Site) -> None:
    send_numbers(site.app, *range(12))
    dumped = ways.dump(site.old, site.app)
    command = ("pg_restore", "--no-owner", "-d", site.app.conninfo)
    ways.attempt(site.old, *command, given=dumped)
    for _ in range(3):  # so that the newest of each shard look well
        send_numbers(site.app, *range(12, 18))
    with Cycle(site.app, forwarding_rules(mom=site.mom)) as cycle:
        errors = {one.error_kind: one.error for one in cycle.run() if one.error_kind}
    assert "saf rebase" in str(errors["Restored"])
    assert arrived(site.mom) == []
    repair(site.app, site.mom)
    run(site.app, mom=site.mom)
    assert arrived(site.mom) == sorted([*range(12), *[*range(12, 18)] * 3])


def test_messages_that_stand_twice_in_an_inbox_are_not_handed_out_twice(mom: Dsn) -> None:
    prepare(mom)
    put(mom, "0", "1", key="k")
    double(mom)
    put(mom, "2", "3", key="k")  # so that the newest of the shard look well
    with (
        pytest.raises(Restored, match=r"several messages with id 1.*saf rebase"),
        saf.receive(mom, SUBSCRIPTION),
    ):
        raise AssertionError("handed out")
    with connect(mom) as store:
        rebase(store, {})
    with saf.receive(mom, SUBSCRIPTION) as delivery:
        assert [message.text() for message in delivery] == ["0", "1", "2", "3"]
