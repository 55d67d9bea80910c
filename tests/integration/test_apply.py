"""Plans: what `saf apply` makes of one, and that `saf export` writes one that changes nothing."""

from __future__ import annotations

import json
import secrets
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg import sql

from saf.broker import services
from saf.broker.embedded import EmbeddedServer
from saf.broker.grants import Kind, grant
from saf.broker.senders import senders
from saf.database import Dsn
from saf.dialogs.contracts import contracts
from saf.errors import ConfigurationError
from saf.operating.plans.difference import apply, difference
from saf.operating.plans.file import read
from saf.operating.plans.tables import granted
from saf.routing import routes
from tests.pipeline import connect
from tests.programs import configuration, saf
from tests.terminals import on_a_terminal

DONE, USAGE = 0, 2

PLAN = """
[brokers.shop]
topics = ["prices"]

[[brokers.shop.message_types]]
name = "order"
validation = "json_schema"
schema = { type = "object", required = ["article"] }

[[brokers.shop.message_types]]
name = "order"
version = 2
validation = "json"

[[brokers.shop.message_types]]
name = "delivery"

[[brokers.shop.contracts]]
name = "ordering"
types = { order = "initiator", delivery = "target" }
type_versions = { order = 1 }

[[brokers.shop.routes]]
service = "billing"
destination = "mom"
quality = "at_least_once"
expires_at = 2041-01-01T00:00:00Z
comment = "it's said: \\"now\\""

[[brokers.shop.routes]]
broker = "11111111-1111-1111-1111-111111111111"
destination = "mom"
enabled = false

[[brokers.shop.routes]]
destination = "mom"

[brokers.shop.routers.departures]
kind = "sql"
expression = "json:origin"
once_per = "key"
enabled = false

[brokers.shop.grants]
ROLE_sender = ["writer"]
ROLE_keeper = ["operator", "receiver"]

[[brokers.shop.senders]]
role = "ROLE_sender"
from_service = "shop"
to_service = "billing"

[[brokers.shop.senders]]
role = "ROLE_sender"
from_service = "shop"

[brokers.mom]
services = ["billing", "orders"]

[brokers.mom.subscriptions.audit]
service = "billing"
from_now = true

[brokers.mom.subscriptions.archive]

[brokers.mom.limits.audit]
rate = "100/s"
concurrency = 4

[brokers.mom.fairness.billing]
fair_by = "header:tenant"
priority = { Alarm = 10, "a b" = 0.5 }
priority_by = "message_type"

[brokers.mom.fairness.archive]
priority = { shop = 2 }
priority_by = "from_service"

[brokers.mom.endpoints.orders]
url = "https://orders.example.com/hooks"

[brokers.mom.endpoints.watch]
url = "https://watch.example.com/hooks"
subscription = "audit"

[brokers.mom.endpoints.watch.settings]
secrets = ["SAF_ENDPOINT_WATCH"]
max_in_flight = 20
"""


@pytest.fixture
def role(server: EmbeddedServer) -> Iterator[str]:
    """The prefix of two roles, which go after all databases of the test."""
    prefix = f"plan_{secrets.token_hex(4)}"
    with connect(server.dsn("postgres")) as connection:
        for statement in ("CREATE ROLE {} LOGIN", "DROP ROLE {}"):
            for name in ("sender", "keeper"):
                role = sql.Identifier(f"{prefix}_{name}")
                connection.execute(sql.SQL(statement).format(role))
            if statement.startswith("CREATE"):
                yield prefix


@pytest.fixture
def folder(role: str, tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    (tmp_path / "plan.toml").write_text(PLAN.replace("ROLE", role))
    return tmp_path


def run(folder: Path, *arguments: str, code: int = DONE) -> str:
    done = saf(*arguments, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == DONE else done.stderr


def applied(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """What `saf apply --yes` has done, by broker."""
    said = json.loads(run(folder, "apply", "plan.toml", "--yes", "--json", *arguments))
    done = {
        one["broker"]: [f"{change['action']} {change['what']}" for change in one["changes"]]
        for one in said["brokers"]
    }
    assert said["applied"] == sorted(name for name, changes in done.items() if changes)
    return done


def test_a_plan_is_applied_whole_and_the_second_time_there_is_nothing_to_do(
    folder: Path, app: Dsn, mom: Dsn, role: str
) -> None:
    done = applied(folder)
    assert done["mom"] == [
        *("create service billing", "create service orders"),
        *("create subscription audit", "create subscription archive"),
        "create limits of subscription audit",
        *("create fairness of subscription billing", "create fairness of subscription archive"),
        *("create endpoint orders", "create endpoint watch"),
    ]
    assert len(done["shop"]) == 13
    with connect(app) as connection:
        (contract,) = contracts(connection)
        assert {one.name: one.version for one in contract.types.values()} == {
            "order": 1,
            "delivery": 1,
        }
        there = routes.configuration(connection)
        assert [one.enabled for one in there.routes] == [True, False, True]
        assert [one.enabled for one in there.routers] == [False]
        assert there.topics == {"prices"}
        assert granted(connection) == {
            f"{role}_sender": ("writer",),
            f"{role}_keeper": ("operator", "receiver"),
        }
    with connect(mom) as connection:
        read_by = {one.name: one.service for one in services.subscriptions(connection)}
        assert read_by == {"billing": "billing", "orders": "orders", "audit": "billing"} | {
            "archive": None
        }
    assert applied(folder) == {"shop": [], "mom": []}
    assert run(folder, "apply", "plan.toml") == ("nothing to do: the brokers match the plan\n")


def test_what_is_exported_changes_nothing_here_and_makes_another_broker_the_same(
    folder: Path, new_broker: Callable[[str], Dsn]
) -> None:
    applied(folder)
    text = run(folder, "export")
    assert max(map(len, text.splitlines())) <= 100
    (folder / "plan.toml").write_text(text)
    assert applied(folder, "--prune") == {"mom": [], "shop": []}
    shop, store = new_broker("shop"), new_broker("store")
    configuration(folder / "saf.toml", {"shop": shop}, {"mom": store})
    assert all(applied(folder, "--prune").values())
    assert tomllib.loads(run(folder, "export")) == tomllib.loads(text)


def test_what_no_terminal_is_to_show_is_exported_as_toml_has_it(
    folder: Path, app: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    odd = "soft\xad hyphen, \x85 next line, \u202e turned, \U000e0001 tag, \x7f \t \" ' \\"
    with connect(app) as connection:
        routes.add_route(connection, "mom", service="a b", comment=odd)
    text = run(folder, "export", "--broker", "shop")
    (folder / "plan.toml").write_text(text)
    assert applied(folder, "--prune") == {"shop": []}
    configuration(folder / "saf.toml", {"shop": (again := new_broker("again"))}, {"mom": app})
    assert applied(folder, "--prune")["shop"]
    with connect(again) as connection:
        there = routes.configuration(connection)
    assert [(one.route.service, one.comment) for one in there.routes] == [("a b", odd)]


def test_what_the_plan_does_not_name_stays_and_is_said_and_goes_with_prune(
    folder: Path, app: Dsn, role: str
) -> None:
    applied(folder)
    (folder / "plan.toml").write_text(
        '[brokers.mom]\nservices = ["billing"]\nsubscriptions = {}\n'
        "[brokers.shop]\ncontracts = []\nroutes = []\ntopics = []\ngrants = {}\n"
    )
    assert applied(folder) == {"mom": [], "shop": []}
    said = run(folder, "apply", "plan.toml")
    assert "mom: not in the plan, and kept: service orders, subscription archive," in said
    done = applied(folder, "--prune")
    assert sorted(done["mom"]) == [
        *("remove service orders", "remove subscription archive", "remove subscription audit"),
    ]
    assert f"remove role {role}_sender" in done["shop"]
    assert applied(folder, "--prune") == {"mom": [], "shop": []}
    with connect(app) as connection:
        assert granted(connection) == {}
        there = routes.configuration(connection)
        assert (there.routes, there.topics) == ((), frozenset())
        assert len(there.routers) == 1, "the plan has no table of routers"
        assert len(contracts(connection)) == 1, "dialogs rely on it"


def test_a_change_is_shown_with_what_was_there(folder: Path, role: str) -> None:
    applied(folder)
    plan = folder / "plan.toml"
    changed = (
        plan.read_text()
        .replace("at_least_once", "exactly_once")
        .replace('"json:origin"', '"text"')
        .replace("https://orders.example.com/hooks", "https://orders.example.com/v2")
        .replace("max_in_flight = 20", "max_in_flight = 30")
    )
    plan.write_text(changed.replace(f'{role}_sender = ["writer"]', f'{role}_sender = ["dialog"]'))
    said = run(folder, "apply", "plan.toml", "--dry-run")
    assert "quality exactly_once, was at_least_once" in said
    assert "expression text, was json:origin" in said
    assert "kinds dialog, was writer" in said
    assert "url https://orders.example.com/v2, was https://orders.example.com/hooks" in said
    done = applied(folder)
    assert done["mom"] == ["change endpoint orders", "change endpoint watch"]
    assert len(done["shop"]) == 3
    assert applied(folder) == {"shop": [], "mom": []}


def test_limits_and_fairness_follow_the_plan_and_pauses_stay(folder: Path, mom: Dsn) -> None:
    applied(folder)
    with connect(mom) as connection:
        audit, billing = (services.subscription(connection, n) for n in ("audit", "billing"))
        assert (audit.rate, audit.concurrency) == ("100/s", 4)
        assert billing.fairness.as_dict() == {
            "fair_by": "header:tenant",
            "priority_by": "message_type",
            "priority": {"Alarm": 10, "a b": 0.5},
        }
        services.pause(connection, "billing", "for a while")
        services.set_fairness(connection, "archive", fair_by="key")
        services.limit(connection, "orders", rate="1/h")
    said = run(folder, "apply", "plan.toml", "--dry-run")
    assert "fair_by none, was key; priority shop 2" in said
    assert "priority_by from_service, was none" in said
    assert "kept: limits of subscription orders" in said
    assert applied(folder, "--prune")["mom"] == [
        "remove limits of subscription orders",
        "change fairness of subscription archive",
    ]
    plan = folder / "plan.toml"
    plan.write_text("[brokers.mom]\nlimits = {}\nfairness = {}\n")
    assert sorted(applied(folder, "--prune")["mom"]) == [
        "remove fairness of subscription archive",
        "remove fairness of subscription billing",
        "remove limits of subscription audit",
    ]
    with connect(mom) as connection:
        left = services.subscriptions(connection)
        assert not any(item.limits or item.fairness for item in left)
        assert [item.name for item in left if item.paused_at] == ["billing"]


def test_a_secret_in_a_plan_is_refused_and_not_shown(folder: Path) -> None:
    plan = folder / "plan.toml"
    plan.write_text(PLAN.replace("SAF_ENDPOINT_WATCH", "hunter2"))
    said = run(folder, "apply", "plan.toml", "--dry-run", code=USAGE)
    assert "a secret is given as the name of an environment variable" in said
    assert "hunter2" not in said


def test_the_first_and_the_last_rule_for_senders_say_what_they_mean_for_others(
    folder: Path, app: Dsn, role: str
) -> None:
    said = run(folder, "apply", "plan.toml", "--dry-run")
    assert "shop: these are its first rules for senders, so nobody can send without one" in said
    applied(folder)
    plan = folder / "plan.toml"
    rule = f"{{ role = '{role}_sender', from_service = 'shop', to_service = 'billing' }}"
    plan.write_text(f"[brokers.shop]\nsenders = [{rule}]\n")
    assert applied(folder, "--prune")["shop"] == [
        f"remove sender role {role}_sender, from_service shop"
    ]
    with connect(app) as connection:
        assert [one.to_service for one in senders(connection)] == ["billing"]
    plan.write_text("[brokers.shop]\nsenders = []\n")
    said = run(folder, "apply", "plan.toml", "--prune", "--dry-run")
    assert "shop: no rule for senders will be left, so any writer may send as any service" in said
    applied(folder, "--prune")
    with connect(app) as connection:
        assert senders(connection) == []


def test_a_dry_run_and_a_no_change_nothing_and_without_a_terminal_it_does_not_guess(
    folder: Path, app: Dsn
) -> None:
    said = run(folder, "apply", "plan.toml", "--dry-run")
    assert "service billing" in said
    assert "Add --yes" in run(folder, "apply", "plan.toml", code=USAGE)
    with connect(app) as connection:
        assert routes.configuration(connection).routes == ()


def test_all_of_one_broker_is_one_transaction_and_another_is_done_all_the_same(
    folder: Path, app: Dsn, mom: Dsn
) -> None:
    plan = folder / "plan.toml"
    plan.write_text(
        '[brokers.shop]\ntopics = ["prices"]\n[brokers.shop.grants]\nnobody = ["writer"]\n'
        '[brokers.mom]\nservices = ["billing"]\n'
    )
    said = run(folder, "apply", "plan.toml", "--yes", code=USAGE)
    assert "saf: broker 'shop': the server of database" in said
    assert "CREATE ROLE" in said
    with connect(app) as connection, connect(mom) as store:
        assert routes.topics(connection) == []
        assert [one.name for one in services.services(store)] == ["billing"]


def test_what_somebody_has_changed_since_it_was_shown_is_not_overrun(
    folder: Path, mom: Dsn
) -> None:
    wanted = read(folder / "plan.toml").brokers["mom"].entries()
    with connect(mom) as connection:
        shown = difference(connection, wanted, prune=False)
        services.create_service(connection, "billing")
        with pytest.raises(ConfigurationError, match="nothing was done"):
            apply(connection, wanted, shown, prune=False, discard=False)
        assert [one.name for one in services.services(connection)] == ["billing"]


def test_a_store_gets_its_first_services_while_messages_for_others_come_in(
    folder: Path, mom: Dsn
) -> None:
    wanted = read(folder / "plan.toml").brokers["mom"].entries()
    more = "INSERT INTO saf.inbox (to_service, body) VALUES (%s, '')"
    with connect(mom) as connection:
        connection.execute(more, ["shipping"])
        shown = difference(connection, wanted, prune=False)
        connection.execute(more, ["returns"])
        with pytest.raises(ConfigurationError, match="nothing was done"):
            apply(connection, wanted, shown, prune=False, discard=False)
        shown = difference(connection, wanted, prune=False)
        connection.execute(more, ["shipping"])
        apply(connection, wanted, shown, prune=False, discard=False)
        assert "billing" in [one.name for one in services.services(connection)]


def test_what_cannot_be_changed_is_named_before_anything_is_done(folder: Path) -> None:
    applied(folder)
    plan = folder / "plan.toml"
    plan.write_text(plan.read_text().replace('order = "initiator"', 'order = "any"'))
    said = run(folder, "apply", "plan.toml", "--yes", code=USAGE)
    assert "contract ordering, version 1 exists and cannot be changed" in said


def test_the_first_services_say_whose_messages_will_wait(folder: Path, mom: Dsn) -> None:
    with connect(mom) as connection:
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('shipping', '')")
    said = run(folder, "apply", "plan.toml", "--dry-run")
    assert "mom: these are its first services, so messages for other services will wait" in said
    assert "shipping (1)" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[broker.mom]", "unknown setting broker (did you mean 'brokers'?)"),
        ("[brokers.mom]\nservice = ['a']", "unknown setting brokers.mom.service (did you mean"),
        ("[brokers.mom]\nservices = ['a', 'a']", "brokers.mom: service a appears twice"),
        ("[brokers.mon]\nservices = ['a']", "plan.toml: broker mon: no [brokers.mon]"),
        ("[[brokers.shop.routes]]\ndestination = 'mon'", "did you mean 'mom'?"),
        ("[brokers.shop.grants]\na = ['reader']", "brokers.shop.grants.a.0: Input should be"),
        ("[brokers.shop]\nservices = ['a']\n[brokers.mom]\nservices = ['a']", None),
        ("[brokers.mom.fairness.a]", "fairness.a: give fair_by, priority or both"),
        (
            "[brokers.mom.fairness.a]\nfair_by = 'tenant'",
            "'tenant' is not one of key, key:SEPARATOR",
        ),
        ("[brokers.mom.fairness.a]\nfair_by = 'key'\npriority_by = 'from_service'", "give weights"),
        ("[brokers.mom.fairness.a]\npriority = { A = 0 }", "'A' has weight 0.0; a weight is"),
        ("[brokers.mom.limits.a]\nrate = '5'", "brokers.mom.limits.a.rate"),
        ("[brokers.mom.fairness.a]\nfair_by = 'key'", "has no subscription 'a'"),
        ("[brokers", "not TOML"),
    ],
)
def test_a_mistake_in_a_plan_is_named(folder: Path, text: str, said: str | None, app: Dsn) -> None:
    (folder / "plan.toml").write_text(text)
    if said is None:  # two names of one broker
        configuration(
            folder / "saf.toml", {"shop": app}, {"mom": Dsn(f"{app.conninfo} options=-cgeqo=on")}
        )
        said = "'shop' and 'mom' of the plan are the same broker"
    assert said in run(folder, "apply", "plan.toml", "--yes", code=USAGE)


def test_rights_that_no_kind_gives_are_said_and_set_right(
    folder: Path, app: Dsn, role: str
) -> None:
    name = f"{role}_sender"
    with connect(app) as connection:
        grant(connection, name, [Kind.WRITER])
        connection.execute(sql.SQL("GRANT DELETE ON saf.outbox TO {}").format(sql.Identifier(name)))
        assert granted(connection) == {name: ("writer", "other rights")}
    assert f"# shop: role {name} has rights that no kind" in run(folder, "export")
    assert f"change role {name}" in applied(folder)["shop"]
    with connect(app) as connection:
        assert granted(connection)[name] == ("writer",)


def test_what_no_plan_can_say_is_a_problem_of_its_broker(folder: Path, app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.sender (role, from_service) VALUES (current_user, E'a\\tb')"
        )
    done = saf("export", cwd=folder)
    assert done.returncode == USAGE
    assert "[brokers.mom]" in done.stdout
    assert "shop" in done.stderr
    assert "senders.0.from_service: a name has 1 to" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_asks_on_a_terminal_of_80_columns_and_no_line_is_longer(folder: Path, mom: Dsn) -> None:
    for answer, created in (("n\n", []), ("y\n", ["billing", "orders"])):
        said = on_a_terminal("apply", "plan.toml", "--broker", "mom", answer=answer, cwd=folder)
        assert "Apply it?" in said
        assert max(map(len, said.splitlines())) <= 80
        with connect(mom) as connection:
            assert [one.name for one in services.services(connection)] == created
