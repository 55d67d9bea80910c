"""A copy of the storage that goes its own way, and a cluster whose counters were set back."""

from __future__ import annotations

import pytest

from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.errors import UsageError
from saf.operating.repair.moved import MovedBy
from saf.operating.repair.rebase import rebase
from tests.moves import ways
from tests.moves.conftest import Site
from tests.moves.ways import burn, delivers_all, repair, send_numbers
from tests.pipeline import connect, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("burnt", "rewritten"),
    [(0, False), (700, False), (700, True)],
    ids=["at-once", "later", "cannot-be-told"],
)
def test_a_storage_copy_that_caught_up_by_logical_replication_loses_nothing(
    site: Site, burnt: int, rewritten: bool
) -> None:
    if rewritten:  # as pg_repack does: it cannot be told from a table that was brought
        with connect(site.app) as connection:
            connection.execute("UPDATE saf.timeline SET written = written")
    send_numbers(site.app, *range(20))
    run(site.app, mom=site.mom)
    send_numbers(site.app, *range(20, 30))
    name = site.name("caught_up")
    with ways.followed_copy(site.old, {name: site.app}) as followers:
        follower = followers[name]
        burn(site.old, 50)  # temporary tables, and whatever else is not replicated
        send_numbers(site.app, *range(30, 40))
        run(site.app, mom=site.mom)
        send_numbers(site.app, *range(40, 45))
        follower.catch_up()
        follower.cut()
        send_numbers(follower.new, *range(45, 60))
        send_numbers(follower.new, *range(60, 66), savepoint=True)
        burn(follower.new, burnt)
        if rewritten:
            with pytest.raises(
                UsageError,
                match=r"do not show how the database was moved.*Add --moved-by .*logical or copy",
            ):
                repair(follower.new, site.mom)
            delivers_all(follower.new, site.mom, 66, moved_by=MovedBy.COPY)
        else:
            delivers_all(follower.new, site.mom, 66)


@pytest.mark.slow
def test_after_a_reset_of_the_epoch_and_the_named_cure_new_messages_arrive() -> None:
    with ways.cluster() as server:
        ways.reset_wal(server, "-e", "1")
        app, mom = server.create_database("app"), server.create_database("mom")
        for one in (app, mom):
            migrate(one)
        send_numbers(app, *range(20))
        run(app, mom=mom)
        send_numbers(app, *range(20, 25))
        ways.reset_wal(server, "-e", "0")
        send_numbers(app, *range(25, 45))
        with connect(mom) as store:
            rebase(store, {})
        delivers_all(app, mom, 45)


@pytest.mark.parametrize("how", ["rewritten", "within-the-cluster"])
def test_what_was_rewritten_or_moved_within_its_cluster_is_not_sent_again_after_an_upgrade(
    site: Site, how: str
) -> None:
    send_numbers(site.app, *range(10))
    run(site.app, mom=site.mom)
    app: Dsn = site.app
    if how == "rewritten":  # as pg_repack does
        with connect(app) as connection:
            connection.execute("UPDATE saf.timeline SET written = written")
    else:
        dumped = ways.dump(site.old, app)
        app = ways.restored(site.old, dumped, site.name())
    send_numbers(app, *range(10, 30))
    run(app, mom=site.mom)
    send_numbers(app, *range(30, 35))
    with connect(app) as connection:  # as after pg_upgrade: see test_upgrades
        connection.execute("UPDATE saf.broker SET system_identifier = 1")
    delivers_all(app, site.mom, 35)
