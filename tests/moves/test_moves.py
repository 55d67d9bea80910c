"""A database that is moved: nothing is lost, doubled or out of order, or it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from saf import Restored
from saf.database import fetch
from saf.operating.repair.moved import MovedBy
from tests.moves.conftest import Site
from tests.moves.ways import (
    arrived,
    burn,
    burn_beyond,
    delivers_all,
    follow,
    in_order,
    repair,
    send_numbers,
)
from tests.pipeline import connect, let_time_pass, run
from tests.tiers import sized

LATER = pytest.mark.parametrize(
    "burnt", [0, 700][: sized(1, 2)], ids=["at-once", "later"][: sized(1, 2)]
)


@pytest.mark.slow
@LATER
@pytest.mark.parametrize("sequences", [False, True], ids=["sequences-not-set", "sequences-set"])
@pytest.mark.parametrize(
    "counter", ["overtakes for a while", "behind", "overtakes", "ahead"][: sized(2, 4)]
)
def test_logical_replication_to_a_new_server_loses_and_doubles_nothing(
    site: Site, sequences: bool, counter: str, burnt: int
) -> None:
    if counter == "ahead":
        burn_beyond(site.new, site.old, 500)
    else:
        burn_beyond(site.old, site.new, 500)
    send_numbers(site.app, *range(30))
    run(site.app, mom=site.mom)
    name = site.name()
    follower = follow(site.app, site.new.create_database(name), name)
    if counter.startswith("overtakes"):
        burn_beyond(site.new, site.old, 40)
    send_numbers(site.app, *range(30, 60))
    if counter == "overtakes for a while":
        burn_beyond(site.old, site.new, 1500)
    run(site.app, mom=site.mom)
    send_numbers(site.app, *range(60, 64))
    send_numbers(site.app, *range(64, 70), savepoint=True)
    follower.cut(sequences=sequences)
    send_numbers(follower.new, *range(70, 84))
    send_numbers(follower.new, *range(84, 90), savepoint=True)
    burn(site.new, burnt)
    # only in this case, the rows fit a copy that caught up as well
    told: dict[str, Any] = (
        {"moved_by": MovedBy.LOGICAL} if counter == "overtakes for a while" else {}
    )
    delivers_all(follower.new, site.mom, 90, **told)


@pytest.mark.parametrize("new", [3, 5])
def test_what_was_sent_with_the_ids_of_older_messages_is_not_taken_for_them(
    site: Site, new: int
) -> None:
    send_numbers(site.app, *range(5), service="unknown")
    with connect(site.mom) as store:
        store.execute("INSERT INTO saf.service (name) VALUES ('billing')")
    run(site.app, mom=site.mom)
    with connect(site.app) as connection:
        fetch(connection, "SELECT setval('saf.outbox_id_seq', 1, false)")
    send_numbers(site.app, *range(5, 5 + new), service="unknown")
    if new < 5:  # else its ids are above all others again
        with pytest.raises(Restored, match=r"saf.outbox.*next id.*saf rebase"):
            run(site.app, mom=site.mom)
        repair(site.app, site.mom)
    run(site.app, mom=site.mom)
    with connect(site.mom) as store:
        store.execute("INSERT INTO saf.service (name) VALUES ('unknown')")
    let_time_pass(site.app)
    run(site.app, mom=site.mom)
    assert arrived(site.mom) == list(range(5 + new))
    assert in_order(site.mom)
