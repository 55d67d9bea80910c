"""Held messages in the browser, over HTTP: found, counted, and decided about once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import saf
from saf.database import Dsn, fetch
from tests.dashboard import VIEW, Dashboard, Visitor, dashboard, finished, settings
from tests.pipeline import bodies, connect, run

PAGE, CONFIRM, DECIDE = "/held", "/held/confirm", "/held/decide"
HELD = "SELECT name, due, refused FROM saf.held WHERE due IS NOT NULL ORDER BY name"
AUDIT = "SELECT action, person, why, cardinality(message_ids) FROM saf.audit ORDER BY audit_id"
REFUSE = "UPDATE saf.held SET due = now() - interval '1 h', refused = '<i>no</i>' WHERE name = 'no'"
outbox = saf.Outbox()


@pytest.fixture
def shop(app: Dsn, mom: Dsn, tmp_path: Path) -> Iterator[Dashboard]:
    """Four held messages, the last of which is refused."""
    due = datetime.now(UTC) + timedelta(hours=3)
    with app.connect(role="test") as connection:
        for name in ("<b>a</b>", "b", "c", "no"):
            outbox.send(connection, "billing", "secret", name=name, key=f"k{name}", deliver_at=due)
        connection.execute(REFUSE)
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, "bodies = true")
    with dashboard(given) as running:
        yield running


def rows(app: Dsn, statement: str) -> list[tuple[Any, ...]]:
    with connect(app) as connection:
        return fetch(connection, statement.encode())


def names(app: Dsn) -> list[str]:
    return [name for name, *_ in rows(app, HELD)]


def chosen(page: str) -> list[str]:
    return re.findall(r'name="id" value="([^"]+)"', page)


def counted(visitor: Visitor, **form: object) -> dict[str, list[str]]:
    """The form that the first step ends with."""
    page = visitor.form(PAGE, CONFIRM, form)
    assert page.status_code == 200, page.text
    fields: dict[str, list[str]] = {}
    for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', page.text):
        fields.setdefault(name, []).append(value)
    return fields


def decide(visitor: Visitor, why: str, **form: object) -> str:
    fields = counted(visitor, **form)
    answer = visitor.post(DECIDE, data=fields | {"why": why}, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    return finished(visitor, answer.headers["location"])


def test_held_messages_are_listed_in_the_order_of_their_times_and_filtered(shop: Dashboard) -> None:
    visitor = shop.client()
    page = visitor.get(PAGE).text
    assert len(chosen(page)) == 4
    assert page.index("refused</span>") < page.index(">b<")
    assert "<b>a</b>" not in page
    assert "<i>no</i>" not in page
    assert "secret" not in page
    assert "in 3 h" in page or "in 2 h 59 min" in page
    for given, count in (
        ({"state": "refused"}, 1),
        ({"state": "overdue"}, 0),
        ({"name_contains": "B"}, 2),
        ({"key": "kc"}, 1),
        ({"service": "shipping"}, 0),
        ({"before": datetime.now(UTC).isoformat()}, 1),
    ):
        assert len(chosen(visitor.get(PAGE, params=given).text)) == count, given
    assert "4 held messages, none with service" in visitor.get(f"{PAGE}?service=shipping").text
    assert visitor.get(f"{PAGE}?state=gone").status_code == 400
    newest = visitor.get(f"{PAGE}?newest=yes").text
    assert chosen(newest) == chosen(page)[::-1]


def test_chosen_messages_are_cancelled_and_the_audit_names_the_person(
    shop: Dashboard, app: Dsn, mom: Dsn
) -> None:
    visitor = shop.client(name="ann")
    ids = chosen(visitor.get(f"{PAGE}?name_contains=b&broker=shop").text)
    asked = visitor.form(PAGE, CONFIRM, {"action": "cancel", "id": ids})
    assert "Cancel <strong>2 held messages" in asked.text
    assert "&lt;b&gt;a&lt;/b&gt;" in asked.text
    assert names(app) == ["<b>a</b>", "b", "c", "no"]
    page = decide(visitor, "paid", action="cancel", id=ids)
    assert "Given up for good" in page
    assert names(app) == ["c", "no"]
    assert rows(app, AUDIT) == [("cancel", "ann", "paid", 2)]
    run(app, mom=mom)
    assert bodies(mom) == []


def test_all_that_match_are_rescheduled(shop: Dashboard, app: Dsn, mom: Dsn) -> None:
    visitor = shop.client()
    before = {name: due for name, due, _ in rows(app, HELD)}
    form = {"action": "reschedule", "matching": "yes", "name_contains": "b"}
    for wrong in ("", "tomorrow"):
        assert visitor.form(PAGE, CONFIRM, form | {"to": wrong}).status_code == 400
    decide(visitor, "", **form, to="2190-01-01T00:00Z")
    after = {name: due for name, due, _ in rows(app, HELD)}
    there = datetime(2190, 1, 1, tzinfo=UTC)
    assert after == before | {"<b>a</b>": there, "b": there}
    decide(visitor, "", action="reschedule", matching="yes", to="2020-01-01T00:00Z")
    run(app, mom=mom)
    assert bodies(mom) == ["secret"] * 4


def test_only_refused_messages_are_retried(shop: Dashboard, app: Dsn, mom: Dsn) -> None:
    visitor = shop.client()
    page = visitor.form(PAGE, CONFIRM, {"action": "move", "matching": "yes"})
    assert "Move <strong>1 held message" in page.text
    page_of_job = decide(visitor, "a rule", action="move", matching="yes")
    assert "Not sent yet" in page_of_job
    assert rows(app, AUDIT)[0][0] == "move"
    run(app, mom=mom)
    assert (bodies(mom), names(app)) == (["secret"], ["<b>a</b>", "b", "c"])


def test_who_may_only_look_decides_nothing(shop: Dashboard, app: Dsn) -> None:
    visitor = shop.client(VIEW)
    assert "Reschedule" not in visitor.get(PAGE).text
    for path in (CONFIRM, DECIDE):
        csrf = visitor.csrf("/doctor")
        form = {"csrf": csrf, "action": "cancel", "matching": "yes"}
        assert visitor.post(path, data=form).status_code == 403
    assert len(names(app)) == 4


def test_the_page_of_a_message_says_until_when_it_is_held_and_shows_its_body(
    shop: Dashboard, app: Dsn
) -> None:
    ((message_id,),) = rows(app, "SELECT message_id::text FROM saf.held WHERE name = 'no'")
    visitor = shop.client()
    page = visitor.get("/message", params={"id": message_id}).text
    assert re.search(r"Held at [^ ]*shop", page)
    assert "&lt;i&gt;no&lt;/i&gt;" in page
    assert "secret" in page
    assert "text/plain" in page


def test_the_navigation_counts_refused_messages(shop: Dashboard) -> None:
    page = shop.client().get("/nav?here=/held").text
    assert re.search(r'href="/held"[^>]*>Held <span class="count bad">1<', page)
