"""The dashboard in a real browser: clicks, the keyboard, what stays live, what is refused.

Pictures of docs/ui.md are taken on the way; with SAF_TESTS_PICTURES=1 they replace those that are
there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from saf.config import Settings
from saf.database import Dsn
from saf.ui.pages import PAGES
from tests import dialogs
from tests.dashboard import OPERATE, Dashboard, dashboard
from tests.pipeline import bodies, connect, new_member, run, send
from tests.ui.conftest import ORDER, REFUSE
from tests.waits import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
READ = sorted(
    path
    for path, one in PAGES.items()
    if not one.changes and "{" not in path and path not in ("/nav", "/dialog")
)
PATIENCE = 60_000
"""In milliseconds: what is waited for comes in a second, on a quiet machine."""
PHONE: Any = {"width": 390, "height": 844}
DESK: Any = {"width": 1180, "height": 740}
HOSTILE = "<img src=x onerror=alert(1)><script>window.owned=1</script>\u202e'\"{{7*7}}"


@contextmanager
def visiting(
    chromium: Browser, there: Dashboard, path: str = "/", **options: Any
) -> Iterator[Page]:
    """Open a page as a new visitor, log in, and mind what the browser complains about."""
    context = chromium.new_context(**{"viewport": DESK, **options})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda said: complaints.append(said.text) if "Content Security" in said.text else None,
    )
    page.goto(there.url + path, wait_until="domcontentloaded")
    page.get_by_label("Token").fill(OPERATE)
    page.get_by_label("Your name").fill("Ann")
    page.get_by_role("button", name="Log in").click()
    page.wait_for_selector("main h1")
    try:
        yield page
        assert complaints == []
    finally:
        context.close()


def go(page: Page, there: Dashboard, path: str) -> None:
    """Go to a page, which is never done loading, because it stays live."""
    page.goto(there.url + path, wait_until="domcontentloaded")


def picture(page: Page, name: str, folder: Path) -> None:
    to = PICTURES if os.environ.get("SAF_TESTS_PICTURES") else folder
    file = to / f"ui-{name}.png"
    page.screenshot(path=file, animations="disabled")
    assert file.stat().st_size < 250_000, "a picture of the documentation is small"


def accessible(page: Page) -> list[str]:
    """What axe-core finds, in short."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]


@pytest.mark.slow
def test_a_failed_order_is_found_and_retried_by_five_clicks(
    chromium: Browser, there: Dashboard, shop: tuple[Dsn, Dsn], orders: list[str], tmp_path: Path
) -> None:
    with visiting(chromium, there) as page:
        page.wait_for_selector("#tile-dead .value >> text=4")
        picture(page, "overview", tmp_path)
        page.locator("#tile-dead").click()
        page.get_by_label("Dead letter 2 of shop").check()
        picture(page, "dead", tmp_path)
        page.get_by_role("button", name="Retry").click()
        page.get_by_label("Why?").fill("the check was wrong")
        picture(page, "confirm", tmp_path)
        page.get_by_role("button", name="Retry 1 message").click()
        page.wait_for_selector(".badge >> text=done")
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
def test_every_page_is_accessible_and_fits_a_phone(
    chromium: Browser, there: Dashboard, app: Dsn, orders: list[str], scheme: str
) -> None:
    with connect(app) as connection:
        member = new_member(connection, name="host:1")
        member.balance(connection)
        send(connection, "x", key="k")
        connection.execute("INSERT INTO saf.route (service, destination) VALUES ('mail', 'gone')")
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('mail', '')")
    assert orders
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
            page.set_viewport_size(DESK)
    assert problems == {}


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
        slow = {
            "offline": False,
            "latency": 400,
            "downloadThroughput": 2e4,
            "uploadThroughput": 2e4,
        }
        page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
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
