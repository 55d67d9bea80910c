"""Decisions in a real browser: each action, two people at once, and what comes in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saf.database import Dsn, fetch
from tests.dashboard import VIEW, Dashboard, dashboard, settings
from tests.destinations import NOWHERE, route, send_to
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, run
from tests.ui.browsing import accessible, go, picture, slow_down, visiting
from tests.ui.dead_letters import letters, many, second_chunk_held
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.full, pytest.mark.slow]


def decide(page: Page, action: str, why: str = "") -> None:
    """Take both steps: choose an action, and confirm it."""
    page.get_by_role("button", name=action, exact=True).click()
    page.get_by_label("Why?").fill(why)
    assert accessible(page) == []
    page.locator("main form button").click()


def is_over(page: Page, state: str) -> None:
    """Wait until the job that the page shows has ended, and how."""
    page.wait_for_selector("h2 .badge >> text=" + state)
    assert accessible(page) == []


def audited(app: Dsn) -> list[tuple[str, str, int]]:
    """Who did what with how many messages."""
    with connect(app) as connection:
        query = "SELECT person, action, cardinality(message_ids) FROM saf.audit ORDER BY audit_id"
        return fetch(connection, query)


@contextmanager
def gone(app: Dsn, mom: Dsn) -> Iterator[None]:
    """A database to which nobody connects, and whose sessions have ended but for one that waits."""
    allow = f'ALTER DATABASE "{app.database}" ALLOW_CONNECTIONS'
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s "
    kill += "AND state <> 'idle in transaction'"
    with connect(mom) as server:
        server.execute(f"{allow} false".encode())
        try:
            server.execute(kill, [app.database])
            yield
        finally:
            server.execute(f"{allow} true".encode())


@pytest.fixture
def two_ways(app: Dsn, other: Dsn, tmp_path: Path) -> Iterator[Dashboard]:
    """Three messages that wait for mom, which is down, two without a route, and a way elsewhere."""
    with connect(app) as connection:
        route(connection, "billing", "mom")
        route(connection, "mail", "nowhere")
        for number in range(3):
            send_to(connection, "billing", f"b{number}", key="k")
        for number in range(2):
            send_to(connection, "mail", f"m{number}", key="k")
        with Cycle(app, forwarding_rules(mom=NOWHERE, other=other)) as cycle:
            cycle.run()
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now() + interval '1 h'")
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": NOWHERE, "other": other})
    with dashboard(given) as running:
        yield running


def test_what_waits_is_tried_now_sent_elsewhere_or_given_up_by_clicks(
    chromium: Browser, two_ways: Dashboard, app: Dsn, other: Dsn, tmp_path: Path
) -> None:
    with visiting(chromium, two_ways, "/parked") as page:
        page.wait_for_selector("td >> text=mail")
        picture(page, "parked", tmp_path)
        page.get_by_role("link", name="Retry now").first.click()
        page.get_by_label("Why?").fill("mom is back")
        page.get_by_role("button", name="Retry now").click()
        page.wait_for_selector("text=1 lane to be tried by the next run")
        page.get_by_role("link", name="Back to parked messages").click()
        page.get_by_role("link", name="One by one").click()
        page.get_by_role("textbox", name="Service").fill("billing")
        page.get_by_role("button", name="Filter").click()
        page.locator("tbody input[type=checkbox]").nth(1).check()
        decide(page, "Discard", "b1 is a mistake")
        is_over(page, "done")
        page.get_by_role("link", name="Parked", exact=True).last.click()
        page.get_by_role("link", name="One by one").click()
        page.get_by_role("textbox", name="Service").fill("billing")
        page.get_by_role("button", name="Filter").click()
        page.get_by_label("All that match").check()
        page.locator("select[name=to]").select_option("other")
        decide(page, "Redirect")
        is_over(page, "done")
        go(page, two_ways, "/parked/messages")
        page.wait_for_selector("td >> text=mail")
        assert page.locator("tbody th").count() == 4
    done = [("retry-now of 1 lanes", 0), ("discard", 1), ("redirect to other", 2)]
    assert audited(app) == [("Ann", what, count) for what, count in done]
    run(app, mom=NOWHERE, other=other)
    assert bodies(other) == ["b0", "b2"]


def test_dead_letters_are_discarded_or_sent_elsewhere_by_clicks(
    chromium: Browser, shop: tuple[Dsn, Dsn], other: Dsn, orders: list[str], tmp_path: Path
) -> None:
    app, mom = shop
    given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom, "other": other})
    with dashboard(given) as there, visiting(chromium, there, "/dead") as page:
        page.get_by_label("Dead letter 1 of shop").check()
        decide(page, "Discard")
        is_over(page, "done")
        go(page, there, "/dead")
        assert orders[0] not in page.locator("tbody").inner_text()
        page.locator("tbody th a").first.click()  # of one message, where it is shown
        page.wait_for_selector("h2 >> text=Dead letter at")
        decide(page, "Discard")
        is_over(page, "done")
        go(page, there, "/dead")
        page.get_by_label("Error contains").fill("amount")
        page.get_by_role("button", name="Filter").click()
        page.get_by_label("All that match").check()
        page.locator("select[name=to]").select_option("other")
        decide(page, "Redirect")
        is_over(page, "done")
    assert [count for _, _, count in audited(app)] == [1, 1, 2]
    run(app, mom=mom, other=other)
    assert len(bodies(other)) == 2


def test_two_operators_who_decide_at_once_see_that_the_first_word_holds(
    chromium: Browser, there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    with (
        visiting(chromium, there, "/dead", name="Ann") as ann,
        visiting(chromium, there, "/dead", name="Bob") as bob,
    ):
        for page, action in ((ann, "Retry"), (bob, "Discard")):
            page.get_by_label("All that match").check()
            page.get_by_role("button", name=action, exact=True).click()
            page.wait_for_selector(f"text={len(orders)} dead letters")
        ann.locator("main form button").click()
        is_over(ann, "done")
        bob.locator("main form button").click()
        is_over(bob, "done")
        assert f"{len(orders)} messages fewer than counted" in bob.locator("main").inner_text()
        go(bob, there, "/dead")
        assert "No message waits" in bob.locator("tbody").inner_text()
        go(bob, there, "/audit")
        assert "Ann" in bob.locator("tbody").inner_text()
    assert [(who, count) for who, _, count in audited(app)] == [("Ann", len(orders))]


def test_the_progress_of_many_is_shown_and_a_click_stops_it(
    chromium: Browser, there: Dashboard, app: Dsn
) -> None:
    many(app)
    with visiting(chromium, there, "/dead") as page:
        page.get_by_label("All that match").check()
        with second_chunk_held(app):
            decide(page, "Discard")
            page.wait_for_selector("text=1,000 messages of 2,500")
            assert page.locator("progress").get_attribute("value") == "1000"
            page.get_by_role("button", name="Stop").click()
            page.wait_for_selector("text=1,000 messages of 2,500")
        is_over(page, "cancelled")
        go(page, there, "/jobs")
        assert "2,000 of 2,500" in page.locator("tbody").inner_text()
    assert letters(app) == 500


def test_a_database_that_goes_in_the_middle_of_a_decision_loses_nothing(
    chromium: Browser, there: Dashboard, app: Dsn, mom: Dsn
) -> None:
    many(app)
    with visiting(chromium, there, "/dead") as page:
        page.get_by_label("All that match").check()
        with second_chunk_held(app):
            decide(page, "Retry")
            page.wait_for_selector("text=1,000 messages of 2,500")
            with gone(app, mom):
                is_over(page, "failed")
                assert "shop" in page.locator("main .why").inner_text()
                go(page, there, "/dead")
                page.wait_for_selector("text=is not shown")
        until(lambda: page.reload() and "is not shown" not in page.locator("main").inner_text())
        assert letters(app) == 1500
        page.get_by_label("All that match").check()
        decide(page, "Retry")
        is_over(page, "done")
    assert letters(app) == 0
    assert sum(count for _, _, count in audited(app)) == 2500


def test_a_decision_that_is_clicked_twice_on_a_slow_network_is_made_once(
    chromium: Browser, there: Dashboard, app: Dsn, orders: list[str]
) -> None:
    with visiting(chromium, there, "/dead") as page:
        slow_down(page)
        page.get_by_label("All that match").check()
        page.get_by_role("button", name="Retry", exact=True).click()
        page.get_by_label("Why?").fill("once")
        page.locator("main form button").dblclick()
        is_over(page, "done")
    until(lambda: letters(app) == 0)
    assert sum(count for _, _, count in audited(app)) == len(orders)


def test_the_keyboard_alone_decides(chromium: Browser, there: Dashboard, app: Dsn) -> None:
    many(app, 3)
    with visiting(chromium, there, "/dead") as page:
        page.get_by_label("Dead letter 2 of shop").focus()
        page.keyboard.press("Space")
        page.get_by_role("button", name="Discard").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("h1 >> text=Discard")
        page.wait_for_selector("[name=why]:focus")  # it has the focus by itself
        page.keyboard.type("by keys")
        page.keyboard.press("Enter")
        is_over(page, "done")
        go(page, there, "/audit")
        assert "by keys" in page.locator("tbody").inner_text()
    assert letters(app) == 2


def test_a_route_is_explained_the_doctor_is_asked_and_a_message_is_found(
    chromium: Browser, there: Dashboard, app: Dsn, orders: list[str], tmp_path: Path
) -> None:
    with connect(app) as connection:
        route(connection, "billing", "mom")
    with visiting(chromium, there, "/routes") as page:
        page.get_by_label("Explain a message for service").fill("billing")
        page.get_by_role("button", name="Explain").click()
        page.wait_for_selector("h2 >> text=Where it goes")
        assert "goes to mom" in page.locator("main .big").inner_text()
        picture(page, "routes", tmp_path)
        go(page, there, "/doctor")
        page.wait_for_selector("text=checks")
        page.get_by_role("button", name="Examine again").click()
        page.wait_for_selector("text=checks")
        go(page, there, "/outbox?broker=shop")
        page.get_by_role("textbox", name="Key").fill(orders[3])
        page.get_by_role("button", name="Filter").click()
        page.locator("tbody th a").click()
        page.wait_for_selector("h2 >> text=Sent at")


def test_who_has_logged_out_or_may_only_look_finds_no_button(
    chromium: Browser, there: Dashboard, orders: list[str]
) -> None:
    with visiting(chromium, there, "/dead", token=VIEW) as page:
        page.wait_for_selector("td >> text=" + orders[0])
        assert page.locator("main input[type=checkbox], main button[name=action]").count() == 0
        page.get_by_role("button", name="Log out").click()
        page.wait_for_selector("text=saf ui prints the token")
        go(page, there, "/dead")
        page.wait_for_selector("text=saf ui prints the token")
