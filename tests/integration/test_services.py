"""Services and subscriptions, from Python and as an operator types them."""

from __future__ import annotations

from pathlib import Path

import pytest

import saf
from saf.broker import services
from saf.database import Dsn
from saf.errors import ConfigurationError, UsageError
from tests.pipeline import bodies, connect, forward, let_time_pass, send
from tests.programs import configuration, last_json
from tests.programs import saf as run_saf


@pytest.fixture
def config(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    return configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})


def test_a_service_has_a_subscription_of_its_own_and_may_have_more(mom: Dsn) -> None:
    with connect(mom) as connection:
        assert services.create_service(connection, "billing")
        assert not services.create_service(connection, "billing")
        assert services.create_subscription(connection, "audit", service="billing")
        assert not services.create_subscription(connection, "audit", service="billing")
        assert services.create_subscription(connection, "archive", service=None)
        (billing,) = services.services(connection)
        assert (billing.name, billing.subscriptions) == ("billing", ["audit", "billing"])
        found = {one.name: one.service for one in services.subscriptions(connection)}
    assert found == {"billing": "billing", "audit": "billing", "archive": None}


def test_each_subscription_gets_every_message_of_its_service_from_when_it_says(mom: Dsn) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        services.create_service(connection, "other")
        store(mom, "billing", "first")
        services.create_subscription(connection, "late", service="billing", start="now")
        services.create_subscription(connection, "archive", service=None)
        store(mom, "billing", "second")
        store(mom, "other", "third")
    expected = {
        "billing": ["first", "second"],
        "late": ["second"],
        "archive": ["first", "second", "third"],
        "other": ["third"],
    }
    for subscription, said in expected.items():
        with saf.receive(mom, subscription) as delivery:
            assert [message.text() for message in delivery] == said
        with saf.receive(mom, subscription) as delivery:
            assert not delivery


def test_a_message_for_an_unknown_service_waits_at_its_source_until_it_is_created(
    app: Dsn, mom: Dsn
) -> None:
    with connect(mom) as store, connect(app) as connection:
        services.create_service(store, "shipping")
        send(connection, "for billing")
        forward(app, mom=mom)
        assert bodies(mom) == []
        ((error,),) = connection.execute("SELECT error FROM saf.backoff").fetchall()
        assert "has no service 'billing'" in error
        services.create_service(store, "billing")
    let_time_pass(app)
    forward(app, mom=mom)
    with saf.receive(mom, "billing") as delivery:
        assert [message.text() for message in delivery] == ["for billing"]


def test_the_first_service_is_not_created_unawares_where_messages_for_others_are(
    mom: Dsn, config: Path
) -> None:
    for _ in range(3):
        store(mom, "orders", "stored while any service is known")
    store(mom, "billing", "one for the first")
    with connect(mom) as connection:
        with pytest.raises(UsageError, match=r"would be the first here, .*'orders' \(3\)"):
            services.create_service(connection, "billing")
        assert services.services(connection) == []
        done = run_saf("service", "create", "billing", "--config", config)
        assert done.returncode == 2
        assert "'orders' (3). Create those in the same command" in done.stderr
        # together, or if that is said; and whoever comes later changes nothing for others
        assert run_saf("service", "create", "billing", "orders", "--config", config).returncode == 0
        services.remove_service(connection, "orders", discard=True)
        assert services.create_service(connection, "shipping")
        for name in ("billing", "shipping"):
            services.remove_service(connection, name, discard=True)
        said = ("service", "create", "billing", "--refuse-others", "--config", config)
        assert run_saf(*said).returncode == 0


def test_what_does_not_exist_is_named_with_what_does(mom: Dsn) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        with pytest.raises(ConfigurationError, match=r"no service 'shop' here, only 'billing'"):
            services.create_subscription(connection, "audit", service="shop")
        with pytest.raises(ConfigurationError, match=r"'billing' already exists, and reads"):
            services.create_subscription(connection, "billing", service=None)
        with pytest.raises(UsageError, match="1 to 255 bytes of printable characters"):
            services.create_service(connection, "")
    with (
        pytest.raises(ConfigurationError, match=r"no subscription 'biling' here, only 'billing'"),
        saf.receive(mom, "biling"),
    ):
        pass


def test_a_reader_with_messages_left_is_removed_only_if_that_is_said(mom: Dsn) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        store(mom, "billing", "left")
        with pytest.raises(UsageError, match=r"'billing' has messages to be read: .*--discard"):
            services.remove_service(connection, "billing")
        assert services.services(connection)
        services.remove_service(connection, "billing", discard=True)
        assert services.services(connection) == []
        assert services.subscriptions(connection) == []
        with pytest.raises(ConfigurationError, match="no service 'billing' here: create it"):
            services.remove_service(connection, "billing")


def test_messages_that_are_left_are_discarded_only_after_a_yes(config: Path, mom: Dsn) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        connection.execute(
            "INSERT INTO saf.dead_letter "
            "(subscription_id, destination, shard, id, reason, error, to_service, body) "
            "SELECT subscription_id, '', 0, n, 'failed', 'no', 'billing', '' "
            "FROM saf.subscription, generate_series(1, 2) AS n WHERE name = 'billing'"
        )
        remove = ("service", "remove", "billing", "--discard", "--config", config)
        done = run_saf(*remove)
        assert done.returncode == 2
        asked = "Remove service 'billing' at mom, and discard the messages that are left?"
        assert done.stderr == f"saf: nothing is done yet: {asked} Add --yes to confirm\n"
        assert services.services(connection)
        done = run_saf(*remove, "--yes")
        assert done.returncode == 0
        assert done.stdout.startswith("mom: service billing removed; 2 messages discarded (")


def test_the_commands_create_list_and_remove(config: Path) -> None:
    def run(*arguments: str) -> str:
        done = run_saf(*arguments, "--config", config)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("service", "create", "billing") == (
        "mom: service billing created\n"
        "mom: from now on, it stores messages for its services only; others wait\n"
    )
    assert run("service", "create", "billing", "shop") == (
        "mom: service billing already exists\nmom: service shop created\n"
    )
    run("service", "remove", "shop")
    run("subscription", "create", "audit", "--service", "billing", "--from-now")
    run("subscription", "create", "archive", "--all-services")
    listed = last_json(run("service", "list", "--json"))
    assert listed["services"] == [
        {"broker": "mom", "service": "billing", "subscriptions": ["audit", "billing"]}
    ]
    listed = last_json(run("subscription", "list", "--json"))
    assert [one["service"] for one in listed["subscriptions"]] == [None, "billing", "billing"]
    assert "billing" in run("service", "list")
    assert "(all)" in run("subscription", "list")
    run("subscription", "remove", "archive")
    assert run("service", "remove", "billing", "--broker", "mom") == (
        "mom: service billing removed\n"
        "mom: no service is left, so it stores messages for any service again\n"
    )
    assert last_json(run("service", "list", "--json"))["services"] == []


def test_a_mistake_is_answered_with_a_sentence_and_code_2(config: Path) -> None:
    for arguments, said in (
        (["service", "remove", "billing"], "no service 'billing' here"),
        (["subscription", "create", "a", "--service", "billing"], "no service 'billing' here"),
        (["subscription", "create", "a"], "--service NAME or --all-services"),
        (["service", "create", "a", "--broker", "nowhere"], "no [brokers.nowhere]"),
    ):
        done = run_saf(*arguments, "--config", config)
        assert done.returncode == 2
        (sentence,) = done.stderr.splitlines()
        assert said in sentence


def store(mom: Dsn, service: str, body: str, key: str | None = None) -> None:
    """As a forwarder would."""
    with connect(mom) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES (%s, %s, %s)",
            (service, key, body.encode()),
        )
