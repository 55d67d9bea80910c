"""Parked messages in the browser, over HTTP: chosen or all that match, counted first, once."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from saf.database import Dsn
from saf.setaside.lane import Origin, WaitsFor
from saf.setaside.selection import ParkedMessages
from saf.ui.pages import set_aside
from tests.dashboard import Dashboard, Visitor, dashboard, finished, settings
from tests.destinations import NOWHERE, route, send_to
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, run

PAGE, CONFIRM, DECIDE = (
    "/parked/messages",
    "/parked/messages/confirm",
    "/parked/messages/decide",
)


@pytest.fixture
def shop(app: Dsn, other: Dsn, tmp_path: Path) -> Iterator[Dashboard]:
    """Five messages for mom, which is down, and one that has arrived elsewhere."""
    with connect(app) as connection:
        route(connection, "billing", "mom")
        route(connection, "shipping", "other")
        for number in range(5):
            send_to(connection, "billing", f"b{number}", key="<b>k</b>")
        send_to(connection, "shipping", "s")
        with Cycle(app, forwarding_rules(mom=NOWHERE, other=other)) as cycle:
            cycle.run()
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": NOWHERE, "other": other})
    with dashboard(given) as running:
        yield running


def counted(visitor: Visitor, **chosen: object) -> dict[str, list[str]]:
    """The form that the first step ends with."""
    page = visitor.form(PAGE, CONFIRM, chosen)
    assert page.status_code == 200, page.text
    fields: dict[str, list[str]] = {}
    for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', page.text):
        fields.setdefault(name, []).append(value)
    return fields


def test_parked_messages_are_discarded_or_redirected_and_the_audit_names_the_person(
    shop: Dashboard, app: Dsn, mom: Dsn, other: Dsn
) -> None:
    visitor = shop.client(name="ann")
    page = visitor.get(PAGE, params={"broker": "shop", "key": "<b>k</b>"}).text
    assert "<b>k</b>" not in page
    ids = re.findall(r'name="id" value="([^"]+)"', page)
    assert len(ids) == 5
    link = html.unescape(re.findall(r'href="(/message[^"]+)"', page)[0])
    one = " ".join(visitor.get(link).text.split())
    for said in ("Parked at", "<dt>Attempts</dt><dd>1</dd>", "<dt>Next</dt>", "is unavailable"):
        assert said in one
    form = counted(visitor, action="discard", id=ids[1:3])
    assert form["expected"] == ["2"]
    assert "2 messages" in finished(visitor, visitor.form(PAGE, DECIDE, form).url.path)
    form = counted(visitor, action="redirect", to="other", matching="yes", destination="mom")
    assert form["expected"] == ["3"]
    with connect(app) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'")
    done = visitor.form(PAGE, DECIDE, form | {"why": ["mom is away"]})
    assert "3 messages" in finished(visitor, done.url.path)
    audit = visitor.get("/audit").text
    assert "redirect to other" in audit
    assert "ann" in audit
    run(app, mom=mom, other=other)
    assert (bodies(other), bodies(mom)) == (["s", "b0", "b3", "b4"], [])


def test_what_is_parked_between_the_count_and_the_decision_is_left_alone(
    shop: Dashboard, app: Dsn, other: Dsn
) -> None:
    visitor = shop.client()
    form = counted(visitor, action="discard", matching="yes")
    with connect(app) as connection:
        send_to(connection, "billing", "late")
        with Cycle(app, forwarding_rules(mom=NOWHERE, other=other)) as cycle:
            cycle.run()
        finished(visitor, visitor.form(PAGE, DECIDE, form).url.path)
        assert ParkedMessages().count(connection, 100).messages == 1


def test_of_a_lane_no_more_messages_are_counted_than_a_page_has_time_for(
    shop: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor = shop.client()
    counts = {}
    for most in (3, 6):
        monkeypatch.setattr(set_aside, "MOST_OF_A_LANE", most)
        counts[most] = f">{most} and more<" in visitor.get("/parked").text
        assert "of destination &#39;mom&#39;" in visitor.get("/parked").text.replace("<bdi>", "")
    assert counts == {3: True, 6: False}


def test_who_may_view_sees_parked_messages_and_decides_nothing(shop: Dashboard) -> None:
    visitor = shop.client("only-looking-around")
    page = visitor.get(PAGE)
    assert page.status_code == 200
    assert 'name="action"' not in page.text
    for action in (CONFIRM, DECIDE):
        answer = visitor.form(PAGE, action, {"action": "discard", "matching": "yes"})
        assert answer.status_code == 403


OF_AN_OPERATOR = """
INSERT INTO saf.parked
    (subscription_id, destination, kind, shard, id, batch, position, to_service, body)
SELECT subscription_id, 'mom', 'retry', 1, 1, 1, 1, 'retried', '' FROM saf.subscription;
INSERT INTO saf.backoff (subscription_id, destination, kind, error)
SELECT subscription_id, 'mom', 'retry', 'no answer' FROM saf.subscription
"""


@pytest.mark.parametrize("page", ["/parked", PAGE, f"{PAGE}/groups"])
def test_parked_messages_are_filtered_by_what_they_wait_for_in_the_words_of_the_command(
    shop: Dashboard, app: Dsn, page: str
) -> None:
    with connect(app) as connection:
        connection.execute(OF_AN_OPERATOR)
    visitor = shop.client()

    def found(**criteria: str) -> set[str]:
        body = visitor.get(page, params=criteria).text.split("<tbody>")[1].split("</tbody>")[0]
        words = re.sub(r"</?bdi>", "", html.unescape(body))
        return {*re.findall(r">(destination 'mom'(?: \(\w+\))?)<", words)}

    whole = visitor.get(page).text
    for name, values in (("waits_for", WaitsFor), ("origin", Origin)):
        select = whole.split(f'<select name="{name}">')[1].split("</select>")[0]
        assert re.findall(r'value="([^"]+)"', select) == [*values]
    assert found() == {"destination 'mom'", "destination 'mom' (retry)"}
    assert found(waits_for="destination", origin="retry") == {"destination 'mom' (retry)"}
    assert found(waits_for="destination", origin="batch") == {"destination 'mom'"}
    assert found(waits_for="service") == set()
    refused = visitor.get(page, params={"waits_for": "main"})
    assert refused.status_code == 400
    assert "route, destination, found-route" in refused.text
