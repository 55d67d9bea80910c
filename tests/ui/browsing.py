"""Visits with a real browser: logging in, going to pages, pictures, what axe-core finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.dashboard import OPERATE, Dashboard

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PICTURES = Path(__file__).parents[2] / "docs/pictures"
PATIENCE = 60_000
"""In milliseconds: what is waited for comes in a second, on a quiet machine."""
PHONE: Any = {"width": 390, "height": 844}
DESK: Any = {"width": 1180, "height": 740}


@contextmanager
def visiting(
    chromium: Browser,
    there: Dashboard,
    path: str = "/",
    *,
    name: str = "Ann",
    token: str = OPERATE,
    **options: Any,
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
    page.get_by_label("Token").fill(token)
    page.get_by_label("Your name").fill(name)
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


def slow_down(page: Page) -> None:
    """Let a page have a network with 20 kB/s, on which everything takes 0.4 s longer."""
    slow = {"offline": False, "latency": 400, "downloadThroughput": 2e4, "uploadThroughput": 2e4}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)


def picture(page: Page, name: str, folder: Path) -> None:
    """Take a picture; with SAF_TESTS_PICTURES=1, it replaces the one of the documentation."""
    to = PICTURES if os.environ.get("SAF_TESTS_PICTURES") else folder
    file = to / f"ui-{name}.png"
    page.screenshot(path=file, animations="disabled")
    assert file.stat().st_size < 250_000, "a picture of the documentation is small"


def accessible(page: Page) -> list[str]:
    """What axe-core finds, in short."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]
