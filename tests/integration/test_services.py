"""Services and subscriptions, from Python and as an operator types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import saf
from saf.broker import services
from saf.cli import app
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, UsageError
from tests.pipeline import bodies, connect, forward, let_time_pass, send
from tests.programs import configuration, last_json
from tests.programs import saf as run_saf
from tests.terminals import on_a_terminal


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
        together = ("service", "create", "billing", "orders", "--from-start", "--config", config)
        assert run_saf(*together).returncode == 0
        services.remove_service(connection, "orders", discard=True)
        assert services.create_service(connection, "shipping")
        for name in ("billing", "shipping"):
            services.remove_service(connection, name, discard=True)
        said = ("service", "create", "billing", "--refuse-others", "--from-start")
        assert run_saf(*said, "--config", config).returncode == 0


def handled(mom: Dsn, service: str) -> list[str]:
    with saf.receive(mom, service) as delivery:
        return [message.text() for message in delivery]


def test_a_service_that_is_created_again_hands_out_handled_messages_only_if_told_to(
    mom: Dsn, config: Path
) -> None:
    with connect(mom) as connection:
        services.create_services(connection, ["billing", "biling"])
        store(mom, "biling", "once")
        assert handled(mom, "biling") == ["once"]
        services.remove_service(connection, "biling")
        with pytest.raises(UsageError, match=r"already has messages for 'biling' \(1\), which"):
            services.create_service(connection, "biling")
        create = ("service", "create", "biling", "--config", config)
        done = run_saf(*create)
        assert done.returncode == 2
        assert "`saf service create biling --from-now`" in done.stderr
        assert run_saf(*create, "--from-now", "--from-start").returncode == 2
        assert [one.name for one in services.services(connection)] == ["billing"]

        assert run_saf(*create, "--from-now").returncode == 0
        store(mom, "biling", "new")
        assert handled(mom, "biling") == ["new"]
        assert run_saf(*create).returncode == 0, "the service exists, so nothing changes"
        services.remove_service(connection, "biling")
        assert run_saf(*create, "--from-start").returncode == 0
        assert handled(mom, "biling") == ["once", "new"]


@pytest.mark.parametrize(("answer", "expected"), [("y", ["once"]), ("n", [])])
def test_an_operator_at_a_terminal_is_asked_whether_to_hand_out_older_messages(
    mom: Dsn, config: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: list[str]
) -> None:
    store(mom, "biling", "once")
    monkeypatch.setattr("saf.cli.service.can_ask", lambda: True)
    create = ["service", "create", "biling", "--config", str(config)]
    done = CliRunner().invoke(app, create, input=answer)
    assert done.exit_code == 0, done.output
    assert "mom: 'biling' (1)" in done.output
    assert "Hand them out? [y/N]" in done.output
    assert handled(mom, "biling") == expected
    done = CliRunner().invoke(app, create)
    assert (done.exit_code, "Hand them out" in done.output) == (0, False)


def test_what_does_not_exist_is_named_with_what_does(mom: Dsn) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        with pytest.raises(ConfigurationError, match=r"has no service 'shop'\. It has 'billing'\."):
            services.create_subscription(connection, "audit", service="shop")
        with pytest.raises(ConfigurationError, match=r"'billing' already exists, and reads"):
            services.create_subscription(connection, "billing", service=None)
        with pytest.raises(UsageError, match="1 to 255 bytes of printable characters"):
            services.create_service(connection, "")
    with (
        pytest.raises(
            ConfigurationError,
            match=r"has no subscription 'biling'\. Did you mean 'billing'\? Create it: `saf",
        ),
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
        with pytest.raises(ConfigurationError, match="has no service 'billing'"):
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
        for key in ("U-1", "U-2", "U-3"):
            store(mom, "billing", "left", key)
        remove = ("service", "remove", "billing", "--discard", "--config", config)
        done = run_saf(*remove)
        assert done.returncode == 2
        lost = "5 messages (3 unread, 0 parked, 2 dead) at mom (U-1, U-2, U-3, …) would be lost"
        assert done.stderr == f"saf: nothing is done yet: {lost}: add --yes\n"
        assert services.services(connection)
        done = run_saf(*remove, "--yes")
        assert done.returncode == 0
        words = "5 messages discarded (3 unread, 0 parked, 2 dead) (U-1, U-2, U-3, …)"
        assert done.stdout.startswith(f"mom: service billing removed; {words}\n")


def test_unread_messages_are_discarded_with_their_number_and_their_trace(
    config: Path, mom: Dsn
) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        services.create_subscription(connection, "tmp1", service="billing")
        for key in ("U-1", "U-2", "U-3"):
            store(mom, "billing", "left", key)
        remove = ("subscription", "remove", "tmp1", "--discard", "--config", str(config))
        lost = "Discard 3 messages (3 unread, 0 parked) at mom (U-1, U-2, U-3)"
        asked = on_a_terminal(*remove, answer="n\n", columns=200)
        assert f"{lost}, and remove subscription 'tmp1'? [y/N]: " in asked
        assert asked.endswith("nothing is done")
        asked = on_a_terminal(*remove, answer="y\n", columns=200)
        done = "mom: subscription tmp1 removed; 3 messages discarded (3 unread, 0 parked)"
        assert asked.endswith(f"{done} (U-1, U-2, U-3)")
        ((message_id,), *_) = fetch(connection, "SELECT message_id FROM saf.inbox ORDER BY id")
    (audited,) = last_json(run_saf("dead", "audit", "--json", "--config", config).stdout)["audit"]
    assert audited["messages"] == 3
    assert audited["action"] == "discard with subscription tmp1"
    assert audited["why"].endswith("is removed, and has 3 messages (3 unread, 0 parked)")
    shown = run_saf("message", str(message_id), "--config", config).stdout
    assert "discarded with subscription tmp1" in shown


def test_a_reader_without_messages_is_removed_without_a_question(config: Path, mom: Dsn) -> None:
    with connect(mom) as connection:
        services.create_service(connection, "billing")
    done = run_saf("service", "remove", "billing", "--discard", "--config", config)
    assert (done.returncode, done.stdout.startswith("mom: service billing removed\n")) == (0, True)


def test_the_audit_of_a_removal_counts_more_unread_messages_than_it_names(
    mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MOST_UNREAD", 2)
    with connect(mom) as connection:
        services.create_service(connection, "billing")
        for key in ("U-1", "U-2", "U-3"):
            store(mom, "billing", "left", key)
        discarded = services.remove_subscription(connection, "billing", discard=True)
        assert discarded == services.LeftOver(unread=3, keys=("U-1", "U-2"))
        ((named, why),) = fetch(connection, "SELECT cardinality(message_ids), why FROM saf.audit")
        assert (named, "3 messages (3 unread, 0 parked)" in why) == (2, True)


def test_the_commands_create_list_and_remove(config: Path) -> None:
    def run(*arguments: str) -> str:
        done = run_saf(*arguments, "--config", config)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("service", "create", "billing") == (
        "mom: service billing created\n"
        "mom: has services now: messages for a service that it lacks will wait\n"
    )
    assert run("service", "create", "billing", "shop") == (
        "mom: service billing already exists\nmom: service shop created\n"
    )
    run("service", "remove", "shop")
    run("subscription", "create", "audit", "--service", "billing", "--from-now")
    run("subscription", "create", "archive", "--all-services")
    listed = last_json(run("service", "list", "--json"))
    assert listed["services"] == [
        {
            "broker": "mom", "service": "billing", "subscriptions": ["audit", "billing"],
            "paused_at": None, "paused_by": None, "paused_why": None, "rate": None,
            "concurrency": None,
        }
    ]  # fmt: skip
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


def test_the_commands_make_a_subscription_fair(config: Path) -> None:
    def run(*arguments: str) -> str:
        done = run_saf(*arguments, "--config", config)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("service", "create", "billing")
    assert run(
        *("service", "set", "billing", "--fair-by", "header:tenant"),
        *("--priority", "shop=10", "--priority", "reports=0.5", "--priority-by", "from_service"),
    ) == (
        "mom: service billing: fair, by header:tenant; shop=10, reports=0.5 by "
        "from_service; restart its workers\n"
    )
    fairness = {
        "fair_by": "header:tenant",
        "priority_by": "from_service",
        "priority": {"shop": 10, "reports": 0.5},
    }
    (listed,) = last_json(run("service", "list", "--json"))["services"]
    assert listed == listed | {"service": "billing", "subscriptions": ["billing"], **fairness}
    (listed,) = last_json(run("subscription", "list", "--json"))["subscriptions"]
    assert listed == listed | {"subscription": "billing", "service": "billing", **fairness}
    assert "header:tenant" in run("service", "list")
    assert run("subscription", "set", "billing", "--priority", "Alarm=2") == (
        "mom: subscription billing: fair, Alarm=2 by message_type; restart its workers\n"
    )
    assert run("subscription", "set", "billing", "--unfair") == (
        "mom: subscription billing: not fair; restart its workers\n"
    )
    (listed,) = last_json(run("service", "list", "--json"))["services"]
    assert "fair_by" not in listed
    assert "fair" not in run("service", "list")


def test_a_mistake_is_answered_with_a_sentence_and_code_2(config: Path) -> None:
    for arguments, said in (
        (["service", "remove", "billing"], "has no service 'billing'. Create it"),
        (["subscription", "create", "a", "--service", "billing"], "has no service 'billing'"),
        (["subscription", "create", "a"], "--service NAME or --all-services"),
        (["service", "create", "a", "--broker", "nowhere"], "no [brokers.nowhere]"),
        (["service", "set", "billing", "--fair-by", "key"], "no service 'billing'"),
        (["service", "set", "billing"], "nothing to set: add --rate"),
        (
            ["service", "set", "billing", "--unfair", "--fair-by", "key"],
            "--unfair goes with neither",
        ),
        (["service", "set", "billing", "--fair-by", "tenant"], "fair_by: 'tenant' is not one of"),
        (["service", "set", "billing", "--priority", "Alarm"], "expected NAME=WEIGHT"),
        (["service", "set", "billing", "--priority", "Alarm=-1"], "has weight -1.0; a weight is"),
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
