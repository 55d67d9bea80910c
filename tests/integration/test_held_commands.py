"""`saf held`, and a name in `saf message`: what operators see and decide about held messages."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import typer

import saf as library
from saf.broker.grants import Kind, grant
from saf.broker.senders import add_senders
from saf.broker.services import create_service
from saf.cli.console import confirm
from saf.database import Dsn, fetch
from saf.operating.decide import Decision, in_chunks
from saf.operating.held import STATES, HeldMessages, counts, named
from saf.schedules.stored import declaration, put
from saf.sending import held
from tests.pipeline import bodies, connect, run
from tests.programs import configuration, saf
from tests.roles import as_user
from tests.signing import signer
from tests.terminals import on_a_terminal

HOUR = timedelta(hours=1)
outbox = library.Outbox(from_service="shop")
SECRET = "a body that no list may show"
OVERDUE = "UPDATE saf.held SET due = now() - interval '1 h' WHERE name = %s"
REFUSE = "UPDATE saf.held SET due = now() - interval '1 h', refused = 'no rule' WHERE name = %s"
DUE = "SELECT name, due, refused FROM saf.held WHERE due IS NOT NULL ORDER BY name"
AUDIT = "SELECT action, why, cardinality(message_ids) FROM saf.audit ORDER BY audit_id"


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    return configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


@pytest.fixture
def ids(app: Dsn) -> Mapping[str, UUID]:
    """Three held messages to billing, an overdue, a refused and a sent one, by their names."""
    now = datetime.now(UTC)
    found = {}
    with app.connect(role="test") as connection:
        for number, name in enumerate(("c", "b", "a", "late", "no")):
            due = now + (number + 1) * HOUR
            found[name] = outbox.send(
                connection, "billing", SECRET, name=name, key=f"k-{name}", deliver_at=due
            )
        found["sent"] = outbox.send(connection, "billing", SECRET, name="sent")
        connection.execute(OVERDUE, ["late"])
        connection.execute(REFUSE, ["no"])
    return found


def rows(app: Dsn, statement: str) -> list[tuple[Any, ...]]:
    with connect(app) as connection:
        return fetch(connection, statement.encode())


def names(app: Dsn) -> list[str]:
    return [name for name, *_ in rows(app, DUE)]


def dues(app: Dsn) -> dict[str, tuple[datetime, str | None]]:
    return {name: (due, refused) for name, due, refused in rows(app, DUE)}


def listed(config: Path, *options: str) -> list[str]:
    done = saf("held", "list", "--json", *options, "--config", config)
    assert done.returncode == 0, done.stderr
    return [row["name"] for row in json.loads(done.stdout)["held"]]


def decided(config: Path, *arguments: str, code: int = 0) -> str:
    done = saf("held", *arguments, "--config", config)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.usefixtures("ids")
def test_held_messages_are_listed_as_they_are_due(config: Path) -> None:
    assert listed(config) == ["late", "no", "c", "b", "a"]
    assert listed(config, "--last") == ["a", "b", "c", "no", "late"]
    assert listed(config, "--overdue") == ["late"]
    assert listed(config, "--refused") == ["no"]
    assert listed(config, "--service", "shipping") == []
    assert listed(config, "--name", "b") == ["b"]
    assert listed(config, "--key", "k-c") == ["c"]
    soon = (datetime.now(UTC) + 1.5 * HOUR).isoformat()
    assert listed(config, "--due-before", soon) == ["late", "no", "c"]


@pytest.mark.usefixtures("ids")
@pytest.mark.parametrize("order", [[], ["--last"]])
def test_pages_of_held_messages_have_no_gap_and_no_repeat(config: Path, order: list[str]) -> None:
    whole, pages, after = listed(config, *order), [], None
    while True:
        more: list[str] = [] if after is None else ["--after", after]
        shop = ("--limit", "2", "--broker", "shop", "--config", config)
        answer = json.loads(saf("held", "list", "--json", *order, *more, *shop).stdout)
        pages.append([row["name"] for row in answer["held"]])
        if (after := answer["next"]["shop"]) is None:
            break
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [name for page in pages for name in page] == whole
    foreign = saf("held", "list", "--after", "x", "--broker", "shop", "--config", config)
    assert (foreign.returncode, "no page of held messages" in foreign.stderr) == (2, True)


def test_messages_that_are_due_at_one_time_follow_each_other_in_pages(
    app: Dsn, config: Path
) -> None:
    due = datetime.now(UTC) + HOUR
    with app.connect(role="test") as connection:
        for name in "edcba":
            outbox.send(connection, "billing", "", name=name, deliver_at=due)
    first = saf("held", "list", "--json", "--limit", "3", "--config", config, "--broker", "shop")
    end = json.loads(first.stdout)["next"]["shop"]
    assert listed(config, "--after", end, "--broker", "shop") == ["b", "a"]


def test_a_list_names_the_sender_and_how_far_the_time_is_and_no_body(
    ids: Mapping[str, UUID], config: Path
) -> None:
    shown = decided(config, "list")
    assert SECRET not in shown
    assert SECRET not in decided(config, "list", "--json")
    lines = {name: line for name in ids for line in shown.splitlines() if f"  {name}  " in line}
    assert re.search(r", 1 h( \d+ (s|min))* ago ", lines["late"])
    assert re.search(r", in (1 h|\d+ min)( \d+ s)? ", lines["c"])
    assert "refused" in lines["no"]
    assert "no rule" in lines["no"]
    assert str(ids["no"]) in lines["no"]
    row = json.loads(decided(config, "list", "--json", "--refused"))["held"][0]
    assert (row["state"], row["refused"], row["broker"]) == ("refused", "no rule", "shop")
    assert row["sender"]


def test_one_message_is_shown_by_its_name_or_its_id_and_its_body_alone(
    ids: Mapping[str, UUID], config: Path
) -> None:
    for which in (["billing", "b"], [str(ids["b"])]):
        shown = decided(config, "show", *which)
        assert "k-b" in shown
        assert "text/plain" in shown
        assert SECRET not in shown
        assert decided(config, "show", *which, "--body") == SECRET
    plain = json.loads(decided(config, "show", "billing", "b", "--json"))["held"]
    assert [row["message_id"] for row in plain] == [str(ids["b"])]
    assert plain[0]["headers"]["content-type"].startswith("text/plain")


def test_a_name_that_is_not_held_was_sent_or_is_unknown(
    ids: Mapping[str, UUID], config: Path
) -> None:
    for command in (["show"], ["cancel", "--yes"], ["reschedule", "--in", "1h"], ["retry"]):
        sent = decided(config, *command, "billing", "sent", code=2)
        assert f"was sent at {datetime.now().year}" in sent
        assert str(ids["sent"]) in sent
        unknown = decided(config, *command, "shipping", "b", code=2)
        assert "no message to service 'shipping' with the name 'b' is known at " in unknown
        missing = decided(config, *command, str(ids["sent"]), code=2)
        assert f"saf message {ids['sent']}" in missing
    assert "none is refused: shop: 'b' to 'billing' is held until" in decided(
        config, "retry", "billing", "b", code=2
    )
    assert "SERVICE and the NAME" in decided(config, "show", "billing", code=2)


def test_cancelling_asks_loses_only_what_it_counted_and_is_audited(
    app: Dsn, mom: Dsn, config: Path, ids: Mapping[str, UUID]
) -> None:
    assert "1 held message at shop (billing b) would be lost" in decided(
        config, "cancel", "billing", "b", code=2
    )
    assert "b" in decided(config, "cancel", "billing", "b", "--dry-run")
    assert names(app) == ["a", "b", "c", "late", "no"]
    done = decided(config, "cancel", "billing", "b", "--why", "paid", "--yes")
    assert done == "shop: 1 held message cancelled (b)\n"
    assert names(app) == ["a", "c", "late", "no"]
    assert rows(app, AUDIT) == [("cancel", "paid", 1)]
    assert (
        "decision to cancel the held message"
        in saf("message", str(ids["b"]), "--config", config).stdout
    )
    by_name = saf("message", "b", "--config", config).stdout
    assert f"'b', message {ids['b']}, was cancelled at " in by_name
    assert by_name.strip().endswith("by postgres: paid")
    cancelled = json.loads(saf("message", "b", "--config", config, "--json").stdout)["cancelled"]
    assert [row["message_id"] for row in cancelled] == [str(ids["b"])]
    decided(config, "cancel", "--service", "billing", "--overdue", "--refused", "--yes", code=2)
    decided(config, "cancel", "--yes", code=2)
    decided(config, "cancel", "--refused", "--yes")
    assert names(app) == ["a", "c", "late"]
    decided(config, "cancel", "--all", "--yes")
    assert names(app) == []
    run(app, mom=mom)
    assert bodies(mom) == [SECRET]  # the sent one
    with app.connect(role="test") as connection:
        assert outbox.send(connection, "billing", "again", name="b").is_new


@pytest.mark.usefixtures("ids")
def test_an_operator_at_a_terminal_is_asked(app: Dsn, config: Path) -> None:
    said = on_a_terminal(
        *("held", "cancel", "--service", "billing", "--config", str(config)), answer="n\n"
    )
    assert "Cancel 5 held messages at shop (billing late, billing no, billing c, …)?" in said
    assert len(names(app)) == 5


class Interrupted(io.StringIO):
    """A terminal where Ctrl-C is typed, or the end."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (EOFError, 1)])
def test_an_interrupted_question_says_that_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
    code: int,
) -> None:
    monkeypatch.setattr(sys, "stdin", Interrupted(error))
    with pytest.raises(typer.Exit) as ended:
        confirm("Cancel all?", yes=False)
    assert ended.value.exit_code == code
    assert capsys.readouterr().err.endswith("\nnothing is done\n")


def test_columns_without_any_value_are_left_out(app: Dsn, config: Path) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "", name="n", deliver_at=datetime.now(UTC) + HOUR)
    header = decided(config, "list").splitlines()[0].split("  ")
    assert {"key", "refused"}.isdisjoint(map(str.strip, header))
    with app.connect(role="test") as connection:
        connection.execute(REFUSE, ["n"])
    header = decided(config, "list").splitlines()[0].split("  ")
    assert "refused" in map(str.strip, header)


@pytest.mark.usefixtures("ids")
def test_rescheduling_moves_what_the_filter_chooses(app: Dsn, mom: Dsn, config: Path) -> None:
    before = dues(app)
    moment = "2190-01-01T00:00:00+00:00"
    done = decided(config, "reschedule", "--name", "a", "--at", moment, "--why", "later")
    assert "1 held message rescheduled to 2190-01-01" in done or "2189-12-31" in done
    after = dues(app)
    assert after["a"] == (datetime.fromisoformat(moment), None)
    assert {name: after[name] for name in "bc"} == {name: before[name] for name in "bc"}
    decided(config, "reschedule", "billing", "no", "--in", "2h")
    due, refused = dues(app)["no"]
    assert refused is None
    assert timedelta(hours=1.9) < due - datetime.now(UTC) <= timedelta(hours=2)
    assert [action.partition(" ")[0] for action, *_ in rows(app, AUDIT)] == ["reschedule"] * 2
    for wrong in ([], ["--in", "1h", "--at", moment], ["--in", "1w"], ["--in", "9999999d"]):
        decided(config, "reschedule", "billing", "a", *wrong, code=2)
    for wrong, right in (
        (["--at", "2190-01-01T07:00"], "2190-01-01T07:00:00Z in UTC"),
        (["--in", "5"], "5s, 5m, 5h or 5d"),
    ):
        said = decided(config, "reschedule", "billing", "a", *wrong, code=2)
        assert right in " ".join(said.replace("│", " ").split())
    assert "deliver_at" in decided(
        config, "reschedule", "billing", "a", "--at", "9999-12-31T00:00Z", code=2
    )
    decided(config, "reschedule", "--service", "billing", "--in", "0")
    run(app, mom=mom)
    assert bodies(mom) == [SECRET] * 6


@pytest.mark.usefixtures("ids")
def test_retrying_concerns_refused_messages_only(app: Dsn, mom: Dsn, config: Path) -> None:
    before = dues(app)
    assert "Give SERVICE and NAME" in decided(config, "retry", code=2)
    done = decided(config, "retry", "--all", "--why", "the rule is back")
    assert "1 held message to be moved by the next `saf forward` (no)" in done
    assert dues(app) == before | {"no": (before["no"][0], None)}
    assert rows(app, AUDIT) == [("move", "the rule is back", 1)]
    assert "No matching held messages" in decided(config, "retry", "--service", "billing")
    run(app, mom=mom)
    assert names(app) == ["a", "b", "c"]


@pytest.mark.usefixtures("ids")
def test_a_message_that_another_transaction_has_locked_stays(app: Dsn, config: Path) -> None:
    with app.connect(role="test") as sender, sender.transaction():
        outbox.send(sender, "billing", "new", name="a", if_there="replace", deliver_at=None)
        command = ("held", "cancel", "--service", "billing", "--yes", "--config", config)
        done = saf(*command)
        assert done.returncode == 75
        assert "shop: 4 held messages cancelled" in done.stdout
        assert "broker 'shop': 1 held message stays as it was, locked by another" in done.stderr
        pid = sender.info.backend_pid
        holder = rf"billing a: locked by pid {pid} \(.+\), in a transaction that has been open for "
        assert re.search(holder, done.stderr)
        for decision in (["cancel", "--yes"], ["reschedule", "--in", "1h"]):
            which = ("billing", "a", "--json", "--config", config)
            done = saf("held", *decision, *which)
            assert done.returncode == 75
            answer = json.loads(done.stdout)
            assert (answer["message_ids"], answer["stay"]) == (
                {"mom": [], "shop": []},
                {"shop": {"in_hand": 1}},
            )
            (row,) = answer["locked"]["shop"]
            assert (row["service"], row["name"], row["pid"]) == ("billing", "a", pid)
            assert row["application"]
            assert row["open_seconds"] >= 0
    assert names(app) == []
    with connect(app) as connection:
        assert [one.sent_at is not None for one in named(connection, "a")] == [True]


def test_a_run_says_how_many_due_messages_were_refused_or_locked(
    new_role: Callable[..., str], app: Dsn, config: Path
) -> None:
    role = new_role()
    with connect(app) as connection:
        grant(connection, role, [Kind.WRITER])
    with as_user(app, role).connect(role="test") as sender:
        for name in ("n", "late"):
            outbox.send(sender, "billing", "1", name=name, deliver_at=datetime.now(UTC) + HOUR)
    with connect(app) as connection:
        add_senders(connection, role, "other", refuse_others=True)
        connection.execute(OVERDUE, ["n"])
        connection.execute(OVERDUE, ["late"])
    with connect(app) as other, other.transaction():
        other.execute("SELECT FROM saf.held WHERE name = 'late' FOR UPDATE")
        said = saf("forward", "--config", config).stdout
        assert "1 refused (see `saf held list --refused`), 1 due, but locked" in said
        answer = json.loads(saf("forward", "--json", "--config", config).stdout)
        assert (answer["refused"], answer["locked"]) == (0, 1)
    answer = json.loads(saf("forward", "--json", "--config", config).stdout)
    assert (answer["refused"], answer["locked"]) == (1, 0)
    assert "refused" not in saf("forward", "--config", config).stdout


def test_changed_rules_say_how_much_will_be_refused_when_due(
    new_role: Callable[..., str], app: Dsn
) -> None:
    role, other = new_role(), new_role()
    with connect(app) as connection:
        for writer in (role, other):
            grant(connection, writer, [Kind.WRITER])
    due = datetime.now(UTC) + HOUR
    for writer in (role, other):
        with as_user(app, writer).connect(role="test") as sender:
            outbox.send(sender, "billing", "", deliver_at=due)
            daily = declaration(writer, "billing", "", every="1d", from_service="shop")
            with sender.transaction():
                put(sender, daily)
    with app.connect(role="test") as owner:
        outbox.send(owner, "billing", "", deliver_at=due)
    rule = ("--from", "shop", "--dsn", app.conninfo)
    said = saf("sender", "add", role, *rule, "--refuse-others").stdout
    assert "1 held message and 1 schedule will be refused when due" in said
    assert "refused when due" not in saf("sender", "add", other, *rule).stdout
    said = saf("sender", "remove", role, *rule).stdout
    assert "1 held message and 1 schedule will be refused when due" in said
    assert "refused when due" not in saf("sender", "remove", other, *rule, "--allow-others").stdout


@pytest.mark.usefixtures("ids")
def test_a_retry_of_a_locked_message_is_to_be_tried_again(app: Dsn, config: Path) -> None:
    with connect(app) as other, other.transaction():
        other.execute("SELECT FROM saf.held WHERE name = 'no' FOR UPDATE")
        said = decided(config, "retry", "billing", "no", code=75)
        assert f"billing no: locked by pid {other.info.backend_pid}" in said
    assert "1 held message to be moved" in decided(config, "retry", "billing", "no")


@pytest.mark.usefixtures("ids")
def test_one_message_and_a_filter_by_its_service_or_name_are_refused(
    app: Dsn, config: Path
) -> None:
    for options in (["--service", "shipping"], ["--name", "b"]):
        said = decided(config, "cancel", "billing", "a", *options, "--yes", code=2)
        assert f"billing a is one message: leave out {options[0]}" in said
    assert len(names(app)) == 5


def test_a_signed_message_without_a_name_keeps_its_time(app: Dsn, mom: Dsn, config: Path) -> None:
    due = datetime.now(UTC) + HOUR
    signed = library.Outbox(from_service="shop", signer=signer())
    with app.connect(role="test") as connection:
        signed.send(connection, "billing", "unnamed", deliver_at=due)
        signed.send(connection, "billing", "named", name="named", deliver_at=due)
    why = "it has no name, so its signature covers its time"
    assert why in decided(config, "reschedule", "--all", "--in", "2h", "--dry-run")
    done = decided(config, "reschedule", "--all", "--in", "2h")
    assert "1 held message rescheduled" in done
    assert f"1 stays: {why}" in done
    kept = {name: moment == due for name, (moment, _) in dues(app).items()}
    assert kept == {None: True, "named": False}
    decided(config, "cancel", "--all", "--yes")
    run(app, mom=mom)
    assert bodies(mom) == []


def test_a_message_that_expires_before_a_time_is_not_moved_to_it(app: Dsn, config: Path) -> None:
    due = datetime.now(UTC) + HOUR
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "x", name="a", deliver_at=due, expires_at=due + HOUR)
    said = decided(config, "reschedule", "billing", "a", "--in", "2h")
    assert "it expires before that time, and nobody would get it" in said
    assert dues(app) == {"a": (due, None)}
    decided(config, "reschedule", "billing", "a", "--in", "90m")
    assert dues(app) != {"a": (due, None)}


def test_a_decision_goes_in_chunks_and_leaves_messages_that_came_later(app: Dsn) -> None:
    due = datetime.now(UTC) + HOUR
    with connect(app) as connection:
        for number in range(5):
            connection.execute(
                "SELECT saf.send('billing', 'x'::text, name => %s, deliver_at => %s)",
                [str(number), due],
            )
        wanted = HeldMessages(service="billing").until_now(connection)
        connection.execute(
            "SELECT saf.send('billing', 'x'::text, name => 'new', deliver_at => %s)", [due]
        )
        soon = (due + HOUR).isoformat()
        chunks = in_chunks(connection, Decision(action="reschedule", to=soon), wanted, "", chunk=2)
        assert [len(ids) for ids in chunks] == [2, 2, 1]
        left = HeldMessages(before=due + timedelta(seconds=1)).rows(connection)
        assert [row.name for row in left] == ["new"]
        assert len(rows(app, AUDIT)) == 3


def test_a_held_message_says_until_when_and_by_name_a_sent_one_leads_to_its_trace(
    app: Dsn, mom: Dsn, config: Path, ids: Mapping[str, UUID]
) -> None:
    with connect(mom) as store:
        create_service(store, "billing")
    for which in ("a", str(ids["a"])):
        shown = saf("message", which, "--config", config).stdout
        assert "held until" in shown
        assert SECRET not in shown
    assert "refused at" in saf("message", "no", "--config", config).stdout
    with app.connect(role="test") as connection:
        outbox.send(connection, "stock", "", name="sent", deliver_at=datetime.now(UTC) + HOUR)
    run(app, mom=mom)
    shown = saf("message", "sent", "--config", config).stdout
    assert "'sent' to 'billing' was sent at" in shown
    assert f"as message {ids['sent']}" in shown
    assert "'sent' to 'stock' is held until" in shown
    assert "unread" in shown  # the trace reaches the store
    only = saf("message", "sent", "--service", "stock", "--json", "--config", config)
    answer = json.loads(only.stdout)
    assert [row["service"] for row in answer["names"]] == ["stock"]
    assert [row["held"]["name"] for row in answer["message"]] == ["sent"]
    unknown = saf("message", "nothing", "--config", config)
    assert (unknown.returncode, "no broker has message nothing" in unknown.stderr) == (2, True)
    by_id = saf("message", str(uuid4()), "--config", config)
    assert by_id.returncode == 2


@pytest.mark.usefixtures("ids")
def test_a_broker_that_does_not_answer_is_named_once(app: Dsn, tmp_path: Path) -> None:
    down = Dsn("host=/nonexistent dbname=other")
    here = configuration(tmp_path / "down.toml", {"shop": app, "gone": down}, {"mom": app})
    for command in (
        *(("message", "a"), ("held", "retry", "billing", "no")),
        *(("held", "reschedule", "billing", "a", "--in", "1d"), ("held", "list")),
        ("held", "cancel", "billing", "a", "--yes"),
    ):
        done = saf(*command, "--config", here)
        assert done.returncode == 75, done.stderr
        assert done.stderr.count("'gone'") == 1
    assert "a" not in names(app)


def test_a_name_may_look_like_an_id(app: Dsn, config: Path) -> None:
    name = str(uuid4())
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "", name=name, deliver_at=datetime.now(UTC) + HOUR)
    assert "is held until" in saf("message", name, "--config", config).stdout


@pytest.mark.usefixtures("ids")
def test_status_counts_held_messages(config: Path) -> None:
    (shop,) = json.loads(saf("status", "--json", "--config", config).stdout)["brokers"]
    assert (shop["held"]["messages"], shop["held"]["overdue"], shop["held"]["refused"]) == (4, 1, 1)
    assert 3500 < shop["held"]["overdue_seconds"] < 3800
    shown = saf("status", "--config", config).stdout
    assert "next due" in shown
    assert "1 for 1 h" in shown


def test_status_says_nothing_of_held_messages_without_any(config: Path) -> None:
    shown = saf("status", "--config", config)
    assert (shown.returncode, "next due" in shown.stdout) == (0, False)


@pytest.mark.every_postgresql
def test_an_operator_has_the_rights_and_a_writer_has_not(
    new_role: Callable[..., str], app: Dsn, ids: Mapping[str, UUID], tmp_path: Path
) -> None:
    assert ids
    operator, writer = new_role(), new_role()
    with connect(app) as connection:
        grant(connection, operator, [Kind.OPERATOR])
        grant(connection, writer, [Kind.WRITER])
    here = configuration(tmp_path / "operator.toml", {"shop": as_user(app, operator)}, {"mom": app})
    decided(here, "show", "billing", "a", "--body")
    decided(here, "reschedule", "billing", "a", "--in", "1d")
    decided(here, "retry", "--all")
    decided(here, "cancel", "billing", "a", "--yes")
    assert saf("status", "--config", here).returncode == 0
    there = configuration(tmp_path / "writer.toml", {"shop": as_user(app, writer)}, {"mom": app})
    assert "permission denied" in decided(there, "list", code=2)


def test_the_states_are_those_of_the_database(app: Dsn, ids: Mapping[str, UUID]) -> None:
    assert ids
    with connect(app) as connection:
        found = {row.name: row.state for row in HeldMessages().rows(connection)}
        assert found == {"a": "held", "b": "held", "c": "held", "late": "overdue", "no": "refused"}
        assert {*found.values()} == {*STATES}
        for state in STATES:
            chosen = HeldMessages(state=state).rows(connection)
            assert {row.name for row in chosen} == {n for n, one in found.items() if one == state}
        assert HeldMessages.every(connection, 100) == 5
        found_counts = counts(connection)
        assert (found_counts.messages, found_counts.refused) == (4, 1)


def test_a_refused_message_is_moved_once_its_role_may_send(
    new_role: Callable[..., str], app: Dsn, mom: Dsn, config: Path
) -> None:
    role = new_role()
    with connect(app) as connection:
        grant(connection, role, [Kind.WRITER])
    with as_user(app, role).connect(role="test") as sender:
        outbox.send(sender, "billing", "1", name="n", deliver_at=datetime.now(UTC) + HOUR)
    with connect(app) as connection:
        add_senders(connection, role, "other", refuse_others=True)
        connection.execute(OVERDUE, ["n"])
        held.move(connection)
        ((refused,),) = fetch(connection, "SELECT refused FROM saf.held")
        assert "may not send as service 'shop'" in refused
    assert listed(config, "--refused") == ["n"]
    run(app, mom=mom)
    assert bodies(mom) == []
    with connect(app) as connection:
        add_senders(connection, role, "shop")
    run(app, mom=mom)
    assert bodies(mom) == ["1"]
