"""What the tests of the checker share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saf.database import Dsn
from tests.crash.plan import QUALITIES
from tests.crash.site import POLITE
from tests.crash.world import World
from tests.crash.writers import ACCOUNTS, TABLES
from tests.pipeline import connect


@pytest.fixture
def world(
    new_broker: Callable[[str], Dsn], backup: Callable[[Dsn], Dsn], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], World]:
    """Builds one."""

    def build() -> World:
        app, mom, other = (new_broker(name) for name in ("app", "mom", "other"))
        made = World(app, mom, other, monkeypatch, backup)
        with connect(made.app) as connection:
            connection.execute(TABLES)
            connection.execute("INSERT INTO account SELECT unnest(%s::text[]), 0", [ACCOUNTS])
            for service, quality in QUALITIES.items():
                destination = "other" if service == "audit" else "mom"
                connection.execute(
                    "INSERT INTO saf.route (service, destination, quality) VALUES (%s, %s, %s)",
                    [service, destination, quality],
                )
        for store in (made.mom, made.other):
            with connect(store) as connection:
                connection.execute(POLITE)
        return made

    return build
