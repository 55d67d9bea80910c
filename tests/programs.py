"""Programs as their users start them, in processes of their own, and what they are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from saf.database import Dsn
from tests import forked

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
INSTALLED = f"{BIN}:/usr/local/bin:/usr/bin:/bin"
"""PATH in an activated environment."""
NOTHING: Mapping[str, str] = MappingProxyType({})

SEND = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'billing', 'order ' || n %% 20, convert_to(%s::text || ' ' || n, 'UTF8')
FROM generate_series(1, %s) AS n ORDER BY n
"""


NAMELESS_HOST = ("--uts", "sh", "-c", 'hostname no-such-host.invalid; exec "$@"', "sh")
"""Arguments of `unshare`, before a command: run it on a host whose name does not resolve."""

USE_SPARK = "SAF_FORWARDER__USE_SPARK"
"""What tests of Spark set to `always`, because little work is done without it."""


def activated() -> str:
    """PATH as in an activated environment, where ``saf`` is that of `tests.forked`."""
    return f"{forked.on_path()}:{INSTALLED}"


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would configure saf or libpq, and with ``more``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == USE_SPARK or not name.startswith(("SAF_", "PG", "SPARK_"))
    }
    return {**kept, **more}


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] = NOTHING,
    cwd: Path | None = None,
    timeout: float = 120,
    tracebacks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run to the end. Whatever it met, it must not have shown a traceback, unless one is due."""
    program, *arguments = map(str, command)
    if program == str(BIN / "saf"):
        done = forked.saf(arguments, env=environment(**env), cwd=cwd, timeout=timeout)
    else:
        done = subprocess.run(
            command,
            env=environment(**env),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    assert tracebacks or "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def saf(
    *arguments: str | Path, env: Mapping[str, str] = NOTHING, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command ``saf``; see `tests.forked`."""
    return run([BIN / "saf", *arguments], env=env, cwd=cwd)


def configuration(
    file: Path, brokers: Mapping[str, Dsn], destinations: Mapping[str, Dsn], **forwarder: object
) -> Path:
    """Write a saf.toml that forwards to the first destination."""
    settings = {"default_destination": next(iter(destinations)), **forwarder}
    lines = [
        *(f"[brokers.{name}]\ndsn = {json.dumps(dsn.conninfo)}" for name, dsn in brokers.items()),
        *(
            f"[destinations.{name}]\ndsn = {json.dumps(dsn.conninfo)}"
            for name, dsn in destinations.items()
        ),
        "[forwarder]",
        *(f"{name} = {json.dumps(value)}" for name, value in settings.items()),
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def send(app: Dsn, count: int, what: str = "message") -> list[str]:
    """Send messages of 20 keys in one transaction; return their bodies in order."""
    with app.connect(role="test") as connection:
        connection.execute(SEND, (what, count))
    return [f"{what} {n}" for n in range(1, count + 1)]


def received(mom: Dsn) -> list[tuple[str, str]]:
    """Key and body of what is in the inbox, in order of arrival."""
    with mom.connect(role="test") as connection:
        rows = connection.execute("SELECT key, body FROM saf.inbox ORDER BY id").fetchall()
    return [(key, bytes(body).decode()) for key, body in rows]


def last_json(text: str) -> dict[str, Any]:
    """The last line, as JSON."""
    value = json.loads(text.splitlines()[-1])
    assert isinstance(value, dict)
    return value


def url(dsn: Dsn) -> str:
    parts = dsn.parts
    return f"postgresql+psycopg://{parts['user']}@/{parts['dbname']}?host={parts['host']}"
