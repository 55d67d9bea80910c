"""The dashboard in a real browser: clicks, the keyboard, what stays live, what is refused.

Pictures of docs/ui.md are taken on the way; with SAF_TESTS_PICTURES=1 they replace those that are
there.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from saf.config import Settings
from saf.database import Dsn
from saf.telemetry import metrics as m
from saf.telemetry.metrics import Sample
from saf.ui import history
from saf.ui.beat import Beat
from saf.ui.history import History
from saf.ui.pages import PAGES
from tests import dialogs
from tests.dashboard import Dashboard, dashboard
from tests.destinations import NOWHERE
from tests.pages import page as page_of_docs
from tests.pipeline import bodies, connect, new_member, run, send
from tests.ui.browsing import DESK, PHONE, accessible, go, picture, slow_down, visiting
from tests.ui.conftest import ORDER, REFUSE
from tests.ui.dead_letters import LETTER
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.full

READ = sorted(
    path
    for path, one in PAGES.items()
    if not one.changes and "{" not in path and path not in ("/nav", "/dialog")
)
HOSTILE = "<img src=x onerror=alert(1)><script>window.owned=1</script>\u202e'\"{{7*7}}"


def a_past_of_an_hour(there: Dashboard) -> None:
    """Let the dashboard have seen an hour of a shop, in which a store was down for a while."""
    now = time.time()
    past = History()
    for minute in range(60):
        down = 30 <= minute < 42
        backlog = 40.0 * (minute - 29) if down else max(0.0, 480.0 - 90 * (minute - 41))
        samples = [
            Sample(
                metric=m.PENDING,
                labels=("shop", "mom", "billing"),
                value=backlog + 3 if minute >= 30 else 3.0,
            ),
            Sample(
                metric=m.OLDEST_PENDING,
                labels=("shop", "mom", "billing"),
                value=60.0 * (minute - 29) if down else 4.0,
            ),
            Sample(metric=m.UNREAD, labels=("mom", "billing"), value=8 + minute % 7),
            Sample(metric=m.LAG, labels=("mom", "inbox", "billing"), value=6 + minute % 5),
        ]
        for service, rate in (("billing", 40), ("mail", 9), ("shipping", 21)) if minute else ():
            sent = rate + minute % 6
            stored = 0 if down else sent * 1.8 if 42 <= minute < 47 else sent
            samples += [
                Sample(metric=history.SENT, labels=("shop", service), value=sent),
                Sample(metric=history.STORED, labels=("mom", service), value=round(stored)),
            ]
        if minute in (31, 32, 35, 50):
            samples += [
                Sample(metric=history.PARKED, labels=("shop", "billing"), value=minute - 28),
                Sample(metric=history.DEAD, labels=("shop", "mail"), value=2),
            ]
        at = now - 60 * (60 - minute)
        past.add(Beat(samples=tuple(samples), at=at, down={"mom": ""} if down else {}))
    kept = there.site.pulse.history
    kept._points.extendleft(reversed(past.points()))
    kept.since = now - 7200


def bold(section: str) -> list[str]:
    """What a section of docs/ui.md says in bold: the words that are clicked on, in their order."""
    text = page_of_docs("ui.md").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"\*\*(.+?)\*\*", text)


@pytest.mark.slow
def test_a_failed_order_is_found_and_retried_as_the_page_says_within_a_minute(
    chromium: Browser, there: Dashboard, shop: tuple[Dsn, Dsn], orders: list[str], tmp_path: Path
) -> None:
    words = bold("To find a failed order, and try it again")
    tile, retry, retry_one, grouped, retry_group, all_of_them = words
    began = time.monotonic()
    with visiting(chromium, there) as page:
        page.wait_for_selector("#tile-dead .value >> text=4")
        picture(page, "overview", tmp_path)
        page.locator("main").get_by_role("link", name=tile).click()
        page.get_by_role("link", name=grouped).click()
        assert page.get_by_role("button", name=retry_group, exact=True).first.is_visible()
        page.go_back()
        page.get_by_role("textbox", name="Key").fill(orders[1])
        page.get_by_role("button", name="Filter").click()
        row = page.locator("tbody tr", has_text=orders[1])
        assert "amount_is_positive" in page.locator("tbody").inner_text()
        page.get_by_role("textbox", name="Key").fill("")
        page.get_by_role("button", name="Filter").click()
        row.get_by_role("checkbox").check()
        assert page.get_by_label(all_of_them).is_visible()
        picture(page, "dead", tmp_path)
        page.get_by_role("button", name=retry, exact=True).click()
        page.get_by_label("Why?").fill("the check was wrong")
        picture(page, "confirm", tmp_path)
        page.get_by_role("button", name=retry_one).click()
        page.wait_for_selector(".badge >> text=done")
        assert time.monotonic() - began < 60
        page.get_by_role("link", name="Audit").last.click()
        page.wait_for_selector("td >> text=the check was wrong")
        assert "Ann" in page.locator("tbody").inner_text()
    app, mom = shop
    run(app, mom=mom)
    assert '"order": 1' in bodies(mom)[-1]
    with visiting(chromium, there, "/dead") as page:
        page.wait_for_selector("td >> text=" + orders[0])
        page.locator("tbody th a").first.click()
        page.wait_for_selector("h2 >> text=Dead letter at")
        picture(page, "message", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.usefixtures("orders")
def test_every_page_is_accessible_and_fits_a_phone(
    chromium: Browser, there: Dashboard, app: Dsn, scheme: str, tmp_path: Path
) -> None:
    with connect(app) as connection:
        member = new_member(connection, name="host:1")
        member.balance(connection)
        send(connection, "x", key="k")
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('mail', 'gone')")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('mail', '')")
    problems: dict[str, object] = {}
    with visiting(chromium, there, color_scheme=scheme) as page:
        page.wait_for_selector("#tile-dead .value >> text=4")
        for path in [*READ, "/routes?service=billing", "/message?id=" + "0" * 32]:
            go(page, there, path)
            if found := accessible(page):
                problems[path] = found
            page.set_viewport_size(PHONE)
            wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            if (width := page.evaluate(wider)) > 0:
                problems[f"{path} on a phone"] = width
            if (path, scheme) == ("/", "dark"):
                picture(page, "phone", tmp_path)
            page.set_viewport_size(DESK)
    assert problems == {}


LONG = "violates check constraint amount_is_positive; failing row contains nothing useful. " * 9
CLIPPED = """
() => [...document.querySelectorAll("main .why, main .fold, main .cards td, main svg.narrow text")]
    .filter(one => one.checkVisibility() && !one.closest("thead") && one.innerHTML !== "")
    .map(one => [one.getBoundingClientRect(), one.textContent.trim().slice(0, 40)])
    .filter(([box, text]) => box.left < 0 || box.right > document.documentElement.clientWidth)
    .map(([box, text]) => `${text} from ${box.left} to ${box.right}`)
"""
HIDDEN_TAB = """
() => {
    const box = document.querySelector("#nav [aria-current]").getBoundingClientRect();
    return box.left < 0 || box.right > document.documentElement.clientWidth || box.bottom > 844;
}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("orders")
def test_a_phone_shows_errors_flows_and_the_present_tab_without_scrolling_sideways(
    chromium: Browser, there: Dashboard, app: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        connection.execute(LETTER.replace("'no'", "%s"), [LONG, 2])
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('mail', 'gone')")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('mail', 'm', '')"
        )
    run(app, mom=NOWHERE)
    with connect(app) as connection:
        connection.execute("UPDATE saf.backoff SET error = %s", [LONG])
    pages = (
        *("/", "/dead", "/dead/groups", "/parked", "/parked/messages", "/parked/messages/groups"),
        *("/outbox", "/charts", "/audit", "/jobs"),
    )
    problems: dict[str, object] = {}
    with visiting(chromium, there, viewport=PHONE) as page:
        page.wait_for_selector("#tile-dead .value >> text=6")
        assert page.locator("svg.flows:visible").count() == 1
        ends = page.locator("svg.flows:visible .node").all_text_contents()
        assert any("shop" in one for one in ends)
        assert any("mom" in one for one in ends)
        for path in pages:
            go(page, there, path)
            page.wait_for_selector("main h1")
            if (clipped := page.evaluate(CLIPPED)) or page.evaluate(HIDDEN_TAB):
                problems[path] = clipped
        go(page, there, "/dead?newest=yes")
        page.locator("tbody").evaluate("one => one.scrollIntoView()")
        picture(page, "dead-phone", tmp_path)
    assert problems == {}


@pytest.mark.slow
@pytest.mark.usefixtures("orders")
def test_a_click_unfolds_a_long_error_and_a_live_page_leaves_it_so(
    chromium: Browser, there: Dashboard, app: Dsn
) -> None:
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('mail', 'm', '')"
        )
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('mail', 'gone')")
    run(app, mom=NOWHERE)
    with connect(app) as connection:
        connection.execute("UPDATE saf.backoff SET error = %s", [LONG])
    with visiting(chromium, there, "/parked") as page:
        fold = page.locator(".fold.long")
        height = fold.locator(".lines").evaluate("one => one.clientHeight")
        fold.locator("summary").click()
        assert fold.locator(".lines").evaluate("one => one.clientHeight") > height
        with connect(app) as connection:
            connection.execute("UPDATE saf.backoff SET attempts = 77")
        page.wait_for_selector("td >> text=77")  # the page has been fetched again
        assert fold.get_attribute("open") is not None
        fold.locator("summary").press("Enter")
        assert fold.get_attribute("open") is None


@pytest.mark.slow
@pytest.mark.usefixtures("orders")
def test_charts_are_drawn_while_figures_come_in(
    chromium: Browser,
    there: Dashboard,
    app: Dsn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "STEP_SECONDS", 0.5)
    with visiting(chromium, there, "/charts") as page:
        with connect(app) as connection:
            for number in range(3):
                send(connection, "x", key=f"k{number}")
        page.wait_for_selector(".legend >> text=not forwarded 3")
        page.wait_for_selector("#services tbody tr")
        a_past_of_an_hour(there)
        page.wait_for_selector("#services .spark polyline")
        assert accessible(page) == []
        picture(page, "charts", tmp_path)


@pytest.mark.slow
def test_what_happens_is_shown_without_reload_and_a_database_that_goes_and_comes_back(
    chromium: Browser, there: Dashboard, app: Dsn, mom: Dsn, orders: list[str]
) -> None:
    with visiting(chromium, there) as page:
        page.wait_for_selector(f"#tile-dead .value >> text={len(orders)}")
        page.evaluate("window.same = true")
        with connect(mom) as store, connect(app) as shop:
            store.execute(REFUSE)
            shop.execute(ORDER, ["late", "{}", '{"amount": -1}'])
        run(app, mom=mom)
        page.wait_for_selector(f"#tile-dead .value >> text={len(orders) + 1}")
        page.wait_for_selector(f"#nav .count >> text={len(orders) + 1}")
        allow = f'ALTER DATABASE "{app.database}" ALLOW_CONNECTIONS'
        kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        with connect(mom) as server:
            server.execute(f"{allow} false".encode())
            server.execute(kill, [app.database])
            page.wait_for_selector("#tile-brokers.bad")
            assert "down" in page.locator("#brokers").inner_text()
            server.execute(f"{allow} true".encode())
        page.wait_for_selector("#tile-brokers:not(.bad)")
        assert page.evaluate("window.same")


def test_without_javascript_pages_are_read_and_decisions_made(
    chromium: Browser, there: Dashboard, app: Dsn, mom: Dsn, orders: list[str]
) -> None:
    with visiting(chromium, there, "/dead", java_script_enabled=False) as page:
        page.get_by_label("All that match").check()
        page.get_by_role("button", name="Retry").click()
        with page.expect_navigation():  # else the reload may meet the page that is being left
            page.get_by_role("button", name=f"Retry {len(orders)} messages").click()
        until(lambda: page.reload() and "done" in page.locator("main h2").inner_text())
    run(app, mom=mom)
    assert len(bodies(mom)) == 12


def test_names_and_bodies_of_others_run_nothing(
    chromium: Browser, given: Settings, app: Dsn, mom: Dsn, orders: list[str]
) -> None:
    assert orders
    with connect(app) as connection, connect(mom) as store:
        store.execute(
            'ALTER TABLE saf.inbox ADD CONSTRAINT "<script>window.owned=1</script>" '
            "CHECK (to_service <> 'billing') NOT VALID"
        )
        connection.execute(
            "INSERT INTO saf.outbox (from_service, to_service, key, message_type, headers, body) "
            "VALUES (%s, 'billing', %s, %s, jsonb_build_object(%s::text, %s::text), %s)",
            [HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE.encode()],
        )
        new_member(connection, name=HOSTILE)
    run(app, mom=mom)
    shown: Any = given.ui.model_copy(update={"bodies": True})
    alerts: list[str] = []
    with (
        dashboard(given.model_copy(update={"ui": shown})) as there,
        visiting(chromium, there) as page,
    ):
        page.on("dialog", lambda one: alerts.append(one.message))
        for path in READ:
            go(page, there, path)
            assert page.evaluate("window.owned") is None, path
        go(page, there, "/dead?broker=shop")
        page.locator("tbody tr", has_text="window.owned").first.locator("th a").click()
        page.wait_for_selector("h2 >> text=Body")
        assert "<script>window.owned=1</script>" in page.locator("pre.body").inner_text()
        assert page.evaluate("window.owned") is None
    assert alerts == []


def test_the_keyboard_alone_leads_to_the_content_and_through_the_pages(
    chromium: Browser, there: Dashboard
) -> None:
    with visiting(chromium, there) as page:
        go(page, there, "/")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.locator("#nav-pending").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("h1 >> text=Pending")


def test_a_slow_network_delays_a_page_and_breaks_nothing(
    chromium: Browser, there: Dashboard, orders: list[str]
) -> None:
    with visiting(chromium, there) as page:
        slow_down(page)
        go(page, there, "/dead")
        page.wait_for_selector("td >> text=" + orders[0])


def test_a_conversation_is_drawn_as_a_sequence(
    chromium: Browser, there: Dashboard, app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    dialogs.prepare(app, mom)
    dialog = dialogs.begin(app, contract="ordering")
    with app.connect(role="test") as connection:
        dialog.send(connection, {"amount": 7}, message_type="order")
    dialogs.forward(app, mom)
    with app.connect(role="test") as connection:
        dialog.send(connection, {"amount": 8}, message_type="note")
    with visiting(chromium, there, "/dialogs") as page:
        page.locator("tbody a").first.click()
        page.wait_for_selector(".sequence .arrow")
        arrows = page.locator(".sequence .arrow")
        assert arrows.count() == 2
        assert "not seen at the other end" in str(arrows.nth(1).text_content())
        picture(page, "dialog", tmp_path)


def test_members_and_shards_are_drawn(
    chromium: Browser, there: Dashboard, app: Dsn, tmp_path: Path
) -> None:
    with connect(app) as connection:
        some = [new_member(connection, name=f"forwarder-{n}:{812 + n}") for n in range(3)]
        for _ in range(4):
            for one in some:
                one.balance(connection)
        for number in range(20):
            send(connection, "x", key=f"k{number}")
    with visiting(chromium, there, "/members") as page:
        page.wait_for_selector(".shards rect.owner-2")
        assert page.locator(".shards").first.locator("rect").count() == 64
        assert "forwarder-1:813" in page.locator("tbody").first.inner_text()
        picture(page, "members", tmp_path)
