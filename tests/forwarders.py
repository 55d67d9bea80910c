"""``saf forward`` as its operator starts it, on a real Spark: one source, one destination."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from saf.database import Dsn
from tests.pipeline import connect
from tests.programs import BIN, environment

FILL = """
INSERT INTO saf.outbox (to_service, key, body, headers, deliver_at, from_service)
SELECT 'billing', 'order ' || n %% 20, convert_to(n::text, 'UTF8'), '{"n": 1}',
       CASE WHEN n %% 3 = 0 THEN now() END, CASE WHEN n %% 5 = 0 THEN 'shop' END
FROM generate_series(1, %s) AS n
"""


def fill(app: Dsn, messages: int) -> None:
    with connect(app) as connection:
        connection.execute(FILL, [messages])


def configuration(folder: Path, app: Dsn, mom: Dsn, **options: object) -> Path:
    path = folder / "saf.toml"
    more = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    path.write_text(
        f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}\n"
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        f'[forwarder]\ndefault_destination = "mom"\nmaster = "local[2]"\n{more}\n'
    )
    return path


def start(config: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BIN / "saf", "forward", "--config", config, "--json", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    summary = json.loads(out.splitlines()[-1])
    assert isinstance(summary, dict)
    return summary


def wait_for(app: Dsn, query: str, seconds: float = 60) -> None:
    """Until a query at the source is true."""
    until = time.monotonic() + seconds
    with connect(app) as connection:
        while time.monotonic() < until:
            row = connection.execute(query).fetchone()
            if row and row[0]:
                return
            time.sleep(0.02)
    pytest.fail(f"never became true: {query}")
