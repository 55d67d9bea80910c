"""Routes that share, and topics, on a real Spark."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from saf.database import Dsn
from saf.routing.routes import add_route
from tests.destinations import NOWHERE
from tests.on_spark import forward
from tests.pipeline import connect, let_time_pass
from tests.programs import BIN, run

pytestmark = pytest.mark.full

FILL = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT service, 'k' || n %% 100, convert_to(n::text, 'UTF8')
FROM generate_series(%s::int, %s::int) AS n, unnest('{orders,prices}'::text[]) AS service
ORDER BY n
"""
ROUTES = """
[[routes]]
service = "orders"
destination = "a"
[[routes]]
service = "orders"
destination = "b"
[[routes]]
destination = "a"
[[routes]]
destination = "b"
[[routes]]
destination = "c"
[topics.prices]
"""


def configure(folder: Path, app: Dsn, **where: Dsn) -> Path:
    path = folder / "saf.toml"
    path.write_text(
        f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}\n"
        + "".join(f"[destinations.{n}]\ndsn = {json.dumps(d.conninfo)}\n" for n, d in where.items())
        + ROUTES
        + '[forwarder]\nmaster = "local[2]"\nchunk_rows = 300\nattempts = 1\n'
    )
    return path


def forward_and_die(config: Path, point: str) -> None:
    """A run whose workers die at a fail point."""
    done = run([BIN / "saf", "forward", "--config", config], env={"SAF_FAILPOINT": point})
    assert done.returncode != 0, "its workers were killed"


def stored(dsn: Dsn, service: str) -> dict[str, list[int]]:
    """The numbers that arrived, by key, in order."""
    by_key: dict[str, list[int]] = defaultdict(list)
    with connect(dsn) as connection:
        for key, body in connection.execute(
            "SELECT key, body FROM saf.inbox WHERE to_service = %s ORDER BY id", [service]
        ):
            by_key[key].append(int(bytes(body)))
    return by_key


def all_of(total: int) -> dict[str, list[int]]:
    return {f"k{key}": [n for n in range(1, total + 1) if n % 100 == key] for key in range(100)}


@pytest.mark.parametrize("point", ["chosen", "mom_commit"])
def test_shared_keys_stick_and_topics_arrive_everywhere_after_a_crash_and_with_one_down(
    app: Dsn, new_broker: Callable[[str], Dsn], tmp_path: Path, point: str
) -> None:
    a, b, c = (new_broker(name) for name in "abc")
    with connect(app) as source:
        source.execute(FILL, [1, 2000])
        config = configure(tmp_path, app, a=a, b=b, c=NOWHERE)
        forward_and_die(config, point)
        assert forward(config, 75)["problems"] == [], "copies for c wait"
        first = stored(a, "orders"), stored(b, "orders")
        assert [len(some) for some in first] == [50, 50]
        assert first[0] | first[1] == all_of(2000)
        assert stored(a, "prices") == stored(b, "prices") == all_of(2000)

        add_route(source, "c", service="orders")
        source.execute(FILL, [2001, 3000])
        let_time_pass(app)
        forward(configure(tmp_path, app, a=a, b=b, c=c))
    second = stored(a, "orders"), stored(b, "orders")
    assert [set(some) for some in second] == [set(some) for some in first]
    assert second[0] | second[1] == all_of(3000)
    for dsn in (a, b, c):
        assert stored(dsn, "prices") == all_of(3000)
