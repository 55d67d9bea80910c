"""What tests of the dashboard share: a shop with dead letters, its dashboard, and a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saf.broker.services import create_service
from saf.config import Settings
from saf.database import Dsn
from tests.dashboard import Dashboard, dashboard, settings
from tests.needed import needed
from tests.pipeline import connect, run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
ORDER = """
INSERT INTO saf.outbox (from_service, to_service, key, message_type, headers, body)
VALUES ('shop', 'billing', %s, 'order.placed', %s::jsonb, convert_to(%s, 'UTF8'))
"""
REFUSE = """
ALTER TABLE saf.inbox ADD CONSTRAINT amount_is_positive
    CHECK (convert_from(body, 'UTF8') !~ '"amount": -')
"""
ALLOW = "ALTER TABLE saf.inbox DROP CONSTRAINT amount_is_positive"


@pytest.fixture
def orders(app: Dsn, mom: Dsn) -> list[str]:
    """Twelve orders, the first of which the MOM store has rejected; return the keys of those."""
    with connect(app) as shop, connect(mom) as store:
        create_service(store, "billing")
        store.execute(REFUSE)
        headers = json.dumps({"content-type": "application/json", "Authorization": "Bearer s3cr3t"})
        for number in range(12):
            amount = -5 if number < 4 else 7 * number
            body = {"order": number, "amount": amount, "card": {"number": "4111-1111"}}
            shop.execute(ORDER, [f"order {1000 + number}", headers, json.dumps(body)])
    run(app, mom=mom)
    with connect(mom) as store:
        store.execute(ALLOW)
    return [f"order {1000 + number}" for number in range(4)]


@pytest.fixture
def shop(app: Dsn, mom: Dsn) -> tuple[Dsn, Dsn]:
    """Where orders are sent, and where they go."""
    return app, mom


@pytest.fixture
def given(app: Dsn, mom: Dsn, tmp_path: Path) -> Settings:
    return settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})


@pytest.fixture
def there(given: Settings) -> Iterator[Dashboard]:
    """The dashboard of a shop and its MOM store, where operators may act."""
    with dashboard(given) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's browser; it ends with the module, because its loop is in everybody's way."""
    from playwright.sync_api import sync_playwright

    program = needed("chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*ARGUMENTS])
        yield browser
        browser.close()
