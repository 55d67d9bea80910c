"""What a run says it has brought to each destination, by service."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from saf import failpoints
from saf.broker.services import create_service
from saf.database import Dsn
from saf.engine.work import Receipt
from saf.routing.routes import add_route
from tests.dying import Crash, crash
from tests.pipeline import Cycle, connect, drain, forwarding_rules, let_time_pass
from tests.programs import BIN, configuration, environment, last_json, saf
from tests.routing import send


def by_service(receipts: Iterable[Receipt]) -> dict[str, dict[str, int]]:
    """Messages by destination and service; as many as were stored or found there."""
    found: dict[str, Counter[str]] = {}
    for one in receipts:
        assert sum(one.services.values()) == one.messages + one.dropped
        if one.destination is not None and one.services:
            found.setdefault(one.destination, Counter()).update(one.services)
    return {destination: dict(services) for destination, services in found.items()}


def test_a_run_says_what_it_has_brought_to_each_destination_by_service(
    app: Dsn, mom: Dsn, other: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom, "other": other})
    with connect(app) as connection:
        add_route(connection, "other", service="prices")
        send(connection, *"abc", service="billing")
        send(connection, "d", service="shipping")
        send(connection, *"ef", service="prices")
    said = last_json(saf("forward", "--json", "--config", config).stdout)
    assert said["by_service"] == {"mom": {"billing": 3, "shipping": 1}, "other": {"prices": 2}}
    assert said["by_destination"] == {"mom": 4, "other": 2}
    assert said["by_broker"] == {"shop": 6}
    said = last_json(saf("forward", "--json", "--config", config).stdout)
    assert (said["by_service"], said["by_broker"]) == ({}, {})


@pytest.mark.parametrize(("point", "found"), [("mom_insert", 0), ("mom_commit", 2)])
def test_what_a_run_had_stored_when_it_was_killed_is_said_by_the_next_one(
    app: Dsn, mom: Dsn, point: str, found: int
) -> None:
    """Nobody heard of it: what waits for these messages, such as a DAG, waits for this."""
    with connect(app) as connection:
        send(connection, "a", service="billing")
        send(connection, "b", service="shipping")
    rules = forwarding_rules(mom=mom)
    failpoints.arm(point, crash)
    with pytest.raises(Crash), Cycle(app, rules) as cycle:
        cycle.run()
    failpoints.arm("")
    with Cycle(app, rules) as cycle:
        receipts = drain(cycle)
    assert sum(one.dropped for one in receipts) == found
    assert by_service(receipts) == {"mom": {"billing": 1, "shipping": 1}}


def test_a_run_after_a_kill_names_the_source_of_what_it_finds_stored(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    with connect(app) as connection:
        send(connection, *"ab", service="billing")
    killed = [str(BIN / "saf"), "forward", "--config", str(config)]
    subprocess.run(
        killed,
        env=environment(SAF_FAILPOINT="mom_commit"),
        start_new_session=True,  # the failpoint kills its process group
        check=False,
    )
    said = last_json(saf("forward", "--json", "--config", config).stdout)
    assert (said["forwarded"], said["dropped"], said["by_broker"]) == (0, 2, {"shop": 2})


def test_messages_for_a_service_that_is_not_known_there_count_when_they_have_arrived(
    app: Dsn, mom: Dsn
) -> None:
    """Also if a killed run had stored their neighbours."""
    with connect(app) as connection, connect(mom) as store:
        create_service(store, "billing", refuse_others=True)
        send(connection, "a", service="billing")
        send(connection, *"bc", service="shipping")
        send(connection, "d", service="billing")
        failpoints.arm("mom_commit", crash)
        with pytest.raises(Crash), Cycle(app, forwarding_rules(mom=mom, chunk_rows=1)) as cycle:
            cycle.run()
        failpoints.arm("")
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            assert by_service(drain(cycle)) == {"mom": {"billing": 2}}
            create_service(store, "shipping")
            let_time_pass(app)
            assert by_service(drain(cycle)) == {"mom": {"shipping": 2}}


def test_counts_stay_few_whatever_services_are_addressed(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body) "
            "SELECT 'service ' || n, ''::bytea FROM generate_series(1, 250) AS n"
        )
    with Cycle(app, forwarding_rules(mom=mom, chunk_rows=90)) as cycle:
        (services,) = by_service(drain(cycle)).values()
    assert services.pop("other") == 150
    assert set(services.values()) == {1}
    assert len(services) == 100
