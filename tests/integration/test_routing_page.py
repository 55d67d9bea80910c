"""The examples of docs/routing.md do what the page says; and what ``saf route`` answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saf import Outbox, Received, begin_dialog
from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.operating.doctor import Finding, examine
from saf.routing.routes import add_route, configuration
from saf.routing_service import RoutingService
from tests.dialogs import receive
from tests.pipeline import bodies, connect
from tests.programs import BIN, ROOT, activated, environment, run, saf
from tests.programs import configuration as configure
from tests.routing import broker_id, without_default

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "routing.md").read_text()
DONE, USAGE, TRY_AGAIN = 0, 2, 75


def blocks(kind: str) -> list[str]:
    return re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(app: Dsn, mom: Dsn, new_broker: Any, tmp_path: Path) -> Path:
    """With a saf.toml of one source, shop, and the destinations mom and erp."""
    configure(tmp_path / "saf.toml", {"shop": app}, {"mom": mom, "erp": new_broker("erp")})
    (tmp_path / "airports.py").write_text("".join(blocks("module")))
    return tmp_path


def declare(folder: Path, text: str) -> None:
    file = folder / "saf.toml"
    file.write_text(file.read_text() + text)


def explained(folder: Path, *arguments: str) -> dict[str, Any]:
    done = saf("route", "explain", *arguments, "--json", cwd=folder)
    (one,) = json.loads(done.stdout)["explanations"]
    return dict(one)


def verdicts(one: dict[str, Any]) -> dict[tuple[str | None, str], str]:
    return {(route["service"], route["destination"]): route["why"] for route in one["routes"]}


def bodies_sent(dsn: Dsn) -> list[tuple[bytes]]:
    with connect(dsn) as connection:
        return connection.execute("SELECT body FROM saf.outbox").fetchall()


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == USAGE
    return done.stderr


def test_the_commands_work_in_their_order(folder: Path) -> None:
    erp = load(folder / "saf.toml").destinations["erp"].broker()
    assert erp is not None
    env = {"PATH": activated(), "PYTHONPATH": str(ROOT)}
    env["ERP_ID"] = str(broker_id(erp))
    done = run(["bash", "-euxc", "".join(blocks("shell"))], env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (
        f"shop: a message for 'billing' at broker {env['ERP_ID']} without a key goes to 'erp'"
        in (done.stdout)
    )
    assert "shop: service 'billing' to 'erp' added, from the next batch on" in done.stdout
    assert "shop: a message for 'departures' becomes one for 'JFK'" in done.stdout
    assert "shop: a message for 'JFK' without a key goes to 'erp'" in done.stdout


def test_a_local_route_is_made_as_the_page_says(folder: Path, app: Dsn, mom: Dsn) -> None:
    declare(folder, "".join(blocks("local file")))
    env = {"PATH": activated(), "SHOP_DSN": app.conninfo}
    done = run(["bash", "-euxc", "".join(blocks("local"))], env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "shop: service 'feeds' to 'shop' added, from now on" in done.stdout
    assert "local: its sender stores it in this inbox" in done.stdout
    with connect(app) as connection, connection.transaction():
        Outbox().send(connection, "feeds", "1")
    assert (bodies(app), bodies_sent(app)) == (["1"], [])
    rows = run(["saf", "route", "list"], env=env, cwd=folder).stdout
    assert "in force, local" in rows
    elsewhere = ["saf", "route", "add", "mom", "--service", "feeds", "--local"]
    there = f"destination 'mom' is broker {broker_id(mom)}, and database"
    assert there in refused(run(elsewhere, env=env, cwd=folder))


def test_a_local_route_of_the_file_is_refused_with_the_way_out(folder: Path) -> None:
    declare(folder, '[[routes]]\nservice = "feeds"\ndestination = "mom"\nlocal = true\n')
    assert "saf route add DESTINATION --service NAME --local" in refused(
        saf("route", "list", cwd=folder)
    )


def test_the_doctor_finds_local_routes_that_are_not(folder: Path, app: Dsn) -> None:
    with connect(app) as connection:
        create_service(connection, "feeds")
        add_route(connection, "mom", service="feeds", local=True)
        assert local_findings(folder) == []
        ((route_id,),) = fetch(connection, "SELECT route_id FROM saf.route")
        connection.execute(f"DROP TRIGGER outbox_local_{route_id} ON saf.outbox".encode())
    (finding,) = local_findings(folder)
    assert "has no trigger at the outbox" in finding.what
    assert finding.cure == (
        "saf route disable mom --service feeds --broker shop, then "
        "saf route enable mom --service feeds --broker shop"
    )
    for change in ("disable", "enable"):
        assert saf("route", change, "mom", "--service", "feeds", cwd=folder).returncode == DONE
    assert local_findings(folder) == []


def local_findings(folder: Path) -> list[Finding]:
    found = examine(load(folder / "saf.toml"))
    return [one for one in found if one.check == "local" and one.severity != "ok"]


def test_the_same_works_from_python(folder: Path, app: Dsn) -> None:
    (code,) = blocks("python")
    done = run([sys.executable, "-c", code], env={"SHOP_DSN": app.conninfo}, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "('erp',)\n"), done.stderr


def test_the_file_declares_routes_that_are_listed_with_their_origin(folder: Path) -> None:
    declare(folder, "".join(blocks("toml")))
    saf("route", "disable", "erp", "--service", "billing", cwd=folder)
    rows = json.loads(saf("route", "list", "--json", cwd=folder).stdout)["routes"]
    assert [(r["service"], r["destination"], r["origin"], r["state"]) for r in rows] == [
        ("billing", "erp", "saf.route", "disabled"),
        (None, "mom", "saf.toml", "in force"),
        (None, "mom", "default", "not needed"),
    ]
    assert rows[1]["comment"] == "until everything has a route of its own"
    assert " ".join(saf("route", "list", cwd=folder).stdout.splitlines()[2].split()) == (
        "shop (any) (any) mom 2031-01-01 00:00:00+00:00 in force saf.toml "
        "until everything has a route of its own"
    )
    topics = json.loads(saf("topic", "list", "--json", cwd=folder).stdout)["topics"]
    assert topics == [{"broker": "shop", "topic": "prices", "destinations": ["mom"]}]


def test_explain_says_of_each_route_whether_it_counts_and_why(folder: Path, app: Dsn) -> None:
    there = "00000000-0000-0000-0000-000000000007"
    for arguments in (
        ["mom"],
        ["erp", "--service", "billing"],
        ["mom", "--service", "billing"],
        ["mom", "--service", "other"],
        ["erp", "--to-broker", there],
        ["erp", "--service", "old", "--expires", "2001-01-01"],
    ):
        assert saf("route", "add", *arguments, cwd=folder).returncode == DONE
    saf("route", "disable", "mom", "--service", "other", cwd=folder)
    one = explained(folder, "billing", "--key", "A-1")
    assert one["destinations"] == ["erp", "mom"]
    assert "has not chosen" in verdicts(one)["billing", "erp"]
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route_choice (service, key, destination) "
            "VALUES ('billing', 'A-1', 'mom')"
        )
    one = explained(folder, "billing", "--key", "A-1")
    assert one["destinations"] == ["mom"]
    why = verdicts(one)
    assert why["billing", "mom"] == "shares, and key 'A-1' has chosen it"
    assert why["billing", "erp"] == "shares, and key 'A-1' has chosen 'mom'"
    assert why["old", "erp"].startswith("expired at 2001-01-01")
    assert why["other", "mom"] == "disabled"
    assert why[None, "erp"] == f"for another broker, {there}"
    assert why[None, "mom"] == "less specific than service 'billing' to 'erp'"
    said = saf("route", "explain", "billing", "--key", "A-1", cwd=folder).stdout
    assert said.startswith("shop: a message for 'billing' with key 'A-1' goes to 'mom'\n")
    assert explained(folder, "elsewhere")["destinations"] == ["mom"]


def test_explain_of_a_topic_names_every_destination(folder: Path) -> None:
    saf("topic", "add", "prices", cwd=folder)
    saf("route", "add", "mom", "--service", "prices", cwd=folder)
    saf("route", "add", "erp", cwd=folder)
    saf("route", "add", "mom", cwd=folder)
    one = explained(folder, "prices")
    assert one["destinations"] == ["mom", "erp"]
    assert verdicts(one)["prices", "mom"] == "a topic goes to every destination"


def test_a_message_that_would_wait_for_a_route_is_code_75(folder: Path) -> None:
    text = (folder / "saf.toml").read_text()
    (folder / "saf.toml").write_text(re.sub("default_destination.*\n", "", text))
    done = saf("route", "explain", "billing", cwd=folder)
    assert done.returncode == TRY_AGAIN
    assert ": no route, so it would wait. Add one: `saf route add DESTINATION " in done.stdout


def test_what_is_wrong_is_named_with_what_was_meant(folder: Path) -> None:
    assert "did you mean 'erp'?" in refused(saf("route", "add", "epr", cwd=folder))
    saf("route", "add", "erp", "--service", "billing", cwd=folder)
    said = refused(saf("route", "remove", "erp", "--service", "biling", cwd=folder))
    assert "no route service 'biling' to 'erp', only service 'billing' to 'erp'" in said
    assert "only none" in refused(saf("topic", "remove", "prices", cwd=folder))
    assert "1 to" in refused(saf("route", "add", "erp", "--service", "", cwd=folder))


def test_routers_are_listed_with_their_origin(folder: Path) -> None:
    declare(folder, "".join(blocks("toml")))
    saf("router", "disable", "arrivals", cwd=folder)
    saf("router", "add", "departures", "--sql", "text", "--once-per", "key", cwd=folder)
    rows = json.loads(saf("router", "list", "--json", cwd=folder).stdout)["routers"]
    assert [(r["service"], r["kind"], r["once_per"], r["origin"], r["enabled"]) for r in rows] == [
        ("arrivals", "sql", "message", "saf.router", False),
        ("departures", "sql", "key", "saf.router", True),
    ]
    assert saf("router", "list", cwd=folder).stdout.splitlines()[1].split() == [
        *("shop", "arrivals", "sql", "message", "redirect", "disabled", "saf.router", "json:dest")
    ]
    assert saf("router", "remove", "arrivals", cwd=folder).returncode == DONE
    rows = json.loads(saf("router", "list", "--json", cwd=folder).stdout)["routers"]
    assert [r["origin"] for r in rows] == ["saf.toml", "saf.router"]


def test_explain_says_what_a_router_would_make_of_a_message(folder: Path) -> None:
    path = {"PYTHONPATH": f"{folder}:{ROOT}"}

    def said(body: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        command = ("router", "explain", *arguments, "--body", body, "--json")
        done = saf(*command, cwd=folder, env=path)
        (one,) = json.loads(done.stdout)["explanations"]
        return done.returncode, one

    add = ("router", "add", "orders", "--python", "airports:by_country")
    assert saf(*add, cwd=folder, env=path).returncode == DONE
    code, one = said('{"country": "CH", "canton": "GR"}', "orders")
    assert (code, one["resolved"]["service"], one["resolved"]["key"]) == (0, "orders-ch", "GR")
    code, one = said("{}", "orders")
    assert (code, one["resolved"]) == (1, None)
    assert one["dead"] == "router 'orders': its classifier raised KeyError: 'country'"
    code, one = said("{}", "billing")
    assert (code, one["resolved"]["service"]) == (0, "billing"), "no router"


def test_a_router_that_cannot_be_is_refused_with_the_reason(folder: Path) -> None:
    def add(*arguments: str) -> str:
        return refused(saf("router", "add", "orders", *arguments, cwd=folder))

    which = "use --sql, --arrow, --python or --function"
    assert which in add()
    assert which in add("--sql", "text", "--python", "a:b")
    assert which in add("--python", "a:b", "--function", "public.classify")
    assert "not module:function" in add("--python", "airports")
    assert "add --elsewhere" in add("--python", "airprts:by_country")
    there = ("router", "add", "orders", "--python", "airprts:by_country", "--elsewhere")
    assert saf(*there, cwd=folder).returncode == DONE
    assert "is a router" in refused(saf("topic", "add", "orders", cwd=folder))
    assert "only 'orders'" in refused(saf("router", "remove", "oders", cwd=folder))


@pytest.fixture
def with_hub(folder: Path, app: Dsn, new_broker: Any, monkeypatch: pytest.MonkeyPatch) -> Dsn:
    """The page's saf.toml: one more broker, and each is a source and a destination."""
    hub: Dsn = new_broker("hub")
    erp = load(folder / "saf.toml").destinations["erp"].broker()
    assert erp is not None
    for name, dsn in (("SHOP_DSN", app), ("HUB_DSN", hub), ("ERP_DSN", erp)):
        monkeypatch.setenv(name, dsn.conninfo)
    (folder / "saf.toml").write_text("".join(blocks("hub")))
    return hub


def test_a_routing_service_is_set_up_and_served_as_the_page_says(
    folder: Path, app: Dsn, with_hub: Dsn
) -> None:
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "HUB_DSN": with_hub.conninfo}
    path = {"PATH": activated()}
    done = run(["bash", "-euxc", "".join(blocks("forward"))], env=env | path, cwd=folder)
    assert done.returncode == DONE, done.stderr
    assert "hub: a message for 'departures' becomes one for 'JFK'" in done.stdout
    assert "hub: router 'departures' has sent on 0 messages" in done.stdout
    assert explained(folder, "departures", "--broker", "shop")["destinations"] == ["hub"]
    places = {name: one.dsn for name, one in load(folder / "saf.toml").brokers.items()}

    def forward(source: Dsn) -> None:
        with without_default(source, 100, **places) as cycle:
            cycle.run()

    with connect(app) as connection, connection.transaction():
        for gate in range(3):
            body = {"origin": "JFK", "gate": gate}
            Outbox().send(connection, "departures", body, key="N1")
    forward(app)
    serve = [f"{BIN}/saf", "router", "serve", "departures", "--broker", "hub"]
    serving = subprocess.Popen(serve, env=environment(**env), cwd=folder, stdout=subprocess.PIPE)
    while len(bodies_sent(with_hub)) != 3:
        assert serving.poll() is None
    serving.terminate()
    out, _ = serving.communicate(timeout=60)
    assert (serving.returncode, out) == (DONE, b"hub: router 'departures' has sent on 3 messages\n")
    forward(with_hub)
    assert [json.loads(body)["gate"] for body in bodies(places["erp"])] == [0, 1, 2]
    (code,) = blocks("service")
    counted = run([sys.executable, "-c", code + "print(service.drain())"], env=env, cwd=folder)
    assert counted.stdout == "0\n", counted.stderr


def test_a_classifier_in_the_database_is_made_and_served_as_the_page_says(
    folder: Path, with_hub: Dsn
) -> None:
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": activated(), "HUB_DSN": with_hub.conninfo}
    script = "".join(blocks("forward") + blocks("function"))
    done = run(["bash", "-euxc", script], env=env, cwd=folder)
    assert done.returncode == DONE, done.stderr
    assert done.stdout.count("hub: a message for 'departures' becomes one for 'JFK'") == 2
    places = {name: one.dsn for name, one in load(folder / "saf.toml").brokers.items()}
    with connect(with_hub) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, body) VALUES ('departures', '{\"origin\":\"JFK\"}')"
        )
    assert RoutingService(with_hub, "departures").drain() == 1
    with without_default(with_hub, 100, **places) as cycle:
        cycle.run()
    assert bodies(places["erp"]) == ['{"origin":"JFK"}']


@pytest.mark.parametrize("mode", ["forward", "redirect"])
def test_replies_come_back_from_behind_the_hub_of_the_page_without_a_route(
    folder: Path, app: Dsn, with_hub: Dsn, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.syspath_prepend(folder)
    env = {"PATH": activated(), "PYTHONPATH": f"{folder}:{ROOT}"}
    script = "".join(blocks("forward") + (blocks(mode) if mode == "redirect" else []))
    done = run(["bash", "-euxc", script], env=env, cwd=folder)
    assert done.returncode == DONE, done.stderr
    settings = load(folder / "saf.toml")
    places = {name: one.dsn for name, one in settings.brokers.items()}
    erp = places["erp"]
    for dsn, service in ((app, "shop"), (erp, "JFK")):
        with connect(dsn) as connection:
            create_service(connection, service)

    def carry() -> None:
        for _ in range(2):
            for one in settings.brokers.values():
                with without_default(one.dsn, 100, **places) as cycle:
                    cycle.run()
            RoutingService(with_hub, "departures").drain()

    def reply(connection: Any, message: Received) -> None:
        assert message.dialog is not None
        message.dialog.send(connection, message.json()["gate"])

    with app.connect(role="test") as connection:
        dialog = begin_dialog(connection, from_service="shop", to_service="departures")
        for gate in range(3):
            dialog.send(connection, {"origin": "JFK", "gate": gate})
    carry()
    assert len(receive(erp, "JFK", reply)) == 3
    carry()
    assert [message.json() for message in receive(app, "shop")] == [0, 1, 2]
    with app.connect(role="test") as connection:
        dialog.send(connection, {"gate": 3})
    carry()
    assert [message.json()["gate"] for message in receive(erp, "JFK")] == [3]
    passed = "SELECT count(*) FROM saf.inbox WHERE sequence > 0"
    with connect(with_hub) as connection:
        assert fetch(connection, passed) == [(7 if mode == "forward" else 3,)]


def test_a_router_that_forwards_is_listed_as_such_and_served_only_where_it_is(
    folder: Path, with_hub: Dsn
) -> None:
    declare(
        folder,
        '[routers.arrivals]\nkind = "python"\nexpression = "airprts:x"\nmode = "forward"\n',
    )
    rows = json.loads(saf("router", "list", "--json", cwd=folder).stdout)["routers"]
    assert {(r["broker"], r["mode"]) for r in rows} == {
        (name, "forward") for name in ("shop", "hub", "erp")
    }
    assert " ".join(saf("router", "list", cwd=folder).stdout.splitlines()[1].split()) == (
        "shop arrivals python message forward in force saf.toml airprts:x"
    )
    with connect(with_hub) as connection:
        create_service(connection, "arrivals")
    serve = ("router", "serve", "arrivals", "--broker", "hub")
    assert "cannot load 'airprts:x'" in refused(saf(*serve, cwd=folder))
    assert "cannot load 'airprts:x'" in refused(saf(*serve, "--processes", "2", cwd=folder))
    saf("router", "disable", "arrivals", cwd=folder)
    assert "no router 'arrivals', or it is disabled" in refused(saf(*serve, cwd=folder))
    add = ("router", "add", "arrivals", "--sql", "text", "--mode", "forward")
    assert "in SQL, which needs Spark" in refused(saf(*add, cwd=folder))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[routers.x]\nkind = "sql"\nexpression = "a"\nmode = "forward"\n', "needs Spark"),
        ('[routers.x]\nkind = "java"\nexpression = "a"\n', "'python' or 'function'"),
        ('[routers.x]\nkind = "arrow"\nexpression = "a"\n', "not module:function"),
        ('[routers.x]\nkind = "function"\nexpression = "a.b"\n', 'mode = "forward"'),
        ('[routers.x]\nkind = "function"\nexpression = "b"\nmode = "forward"\n', "not schema."),
        ('[routers.x]\nkind = "sql"\nexpresion = "a"\n', "did you mean 'expression'?"),
        ('[topics.x]\n[routers.x]\nkind = "sql"\nexpression = "a"\n', "is a topic too"),
        ('[[routes]]\ndestination = "epr"\n', "did you mean 'erp'?"),
        ('[[routes]]\ndestnation = "erp"\n', "did you mean 'destination'?"),
        ('[[routes]]\ndestination = "erp"\nexpires_at = 2031-01-01T00:00:00\n', "timezone"),
        ('[[routes]]\ndestination = "erp"\n[[routes]]\ndestination = "erp"\n', "routes.0"),
        ('[topics.prices]\ncoment = "x"\n', "did you mean 'comment'?"),
    ],
)
def test_a_route_of_the_file_that_cannot_be_is_refused(folder: Path, text: str, said: str) -> None:
    declare(folder, text)
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        load(folder / "saf.toml")


def test_explain_of_a_router_says_who_knows(folder: Path) -> None:
    saf("router", "add", "departures", "--sql", "text", cwd=folder)
    done = saf("route", "explain", "departures", cwd=folder)
    assert done.returncode == DONE
    assert "goes where its router says: `saf router explain departures" in done.stdout
    one = explained(folder, "departures")
    assert (one["router"], one["destinations"]) == (True, [])


def test_the_doctor_finds_routers_without_a_function(folder: Path) -> None:
    add = ("router", "add", "orders", "--python", "airprts:by_country", "--elsewhere")
    assert saf(*add, cwd=folder).returncode == DONE
    found = [one for one in examine(load(folder / "saf.toml")) if one.check == "routes"]
    (wrong,) = [one for one in found if one.severity == "warning"]
    assert "router 'orders' cannot load 'airprts:by_country'" in wrong.what
    assert wrong.cure.endswith("saf router remove orders --broker shop")


def test_the_doctor_finds_routes_that_lead_nowhere(folder: Path, app: Dsn) -> None:
    text = (folder / "saf.toml").read_text()
    (folder / "saf.toml").write_text(re.sub("default_destination.*\n", "", text))

    def found() -> list[Finding]:
        checks = examine(load(folder / "saf.toml"))
        return [one for one in checks if one.check == "routes" and one.where == "broker 'shop'"]

    assert [one.severity for one in found()] == ["ok"]
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination) VALUES ('billing', 'epr'), ('x', 'epr')"
        )
        connection.execute("UPDATE saf.route SET enabled = false WHERE service = 'x'")
        connection.execute("INSERT INTO saf.topic (name) VALUES ('prices')")
        assert len(configuration(connection).routes) == 2
    wrong = found()
    assert [one.severity for one in wrong] == ["error", "warning"]
    assert "service 'billing' to 'epr'" in wrong[0].what
    assert "did you mean 'erp'?" in wrong[0].cure
    assert "topic 'prices'" in wrong[1].what
