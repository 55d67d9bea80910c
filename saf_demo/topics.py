"""Through a topic: the messages go to a queue, and a source reads the topic into a MOM store.

PostgreSQL, a queue, PostgreSQL, with saf at both ends. The process that reads is killed in the
middle, between its commit and the next chunk, and another one continues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saf.broker.services import create_services
from saf.database import fetch
from saf.errors import SafError
from saf.operating.wording import counted
from saf.sources.decoding import SENT_BY
from saf_demo import kinds, proof
from saf_demo.place import Place
from saf_demo.stage import Stage, step

if TYPE_CHECKING:
    from saf.database import Dsn
    from saf.destinations.settings import DestinationSettings

TOPIC = "flights"
KILLED_AT = "mom_commit:2"
CHUNK_ROWS = 200
SERVICES = "SELECT DISTINCT to_service FROM saf.outbox ORDER BY 1"
COUNT = "SELECT count(*) FROM saf.inbox"


@contextmanager
def place(stage: Stage, kind: str) -> Iterator[Place]:
    """Yield a place whose messages go through a topic into a MOM store."""
    application, mom = stage.databases(f"{kind}_through", f"{kind}_store").values()
    with kinds.serve(kind, stage.folder_of(f"{kind}_topics")) as served:
        settings = served.model_copy(update={"topic": TOPIC})

        def send_on() -> str:
            return _read(stage, kind, settings, application, mom)

        yield Place(
            application=application,
            destinations={f"{kind}_store": settings},
            received=lambda _: proof.stored(mom, without=SENT_BY),
            send_on=send_on,
        )


def _read(
    stage: Stage, kind: str, settings: DestinationSettings, application: Dsn, mom: Dsn
) -> str:
    """Read the topic into the MOM store, by a process that is killed and by the next one."""
    file = stage.folder / f"through-{kind}.toml"
    with application.connect(role="demo") as connection:
        services = [name for (name,) in fetch(connection, SERVICES)]
    with mom.connect(role="demo", autocommit=True) as connection:
        create_services(connection, services)
        before = fetch(connection, COUNT)[0][0]
        file.write_text(_configuration(kind, settings, services[0], mom))
        with step(stage.console, "reading the topic"):
            started = time.monotonic()
            killed = _forward(file, {"SAF_FAILPOINT": KILLED_AT})
            done = _forward(file, {})
            seconds = time.monotonic() - started
        if done.returncode != 0:
            raise SafError(f"the topic could not be read: {done.stderr.strip()}")
        count = fetch(connection, COUNT)[0][0] - before
    words = f"read {counted(count, 'message')} of the topic in {seconds:.1f} s"
    return words + (", by two processes: one was killed" if killed.returncode < 0 else "")


def _configuration(kind: str, settings: Any, service: str, mom: Dsn) -> str:
    """Return a saf.toml with nothing but the topic and the MOM store."""
    if kind == "redis":
        where = f'server = "{settings.server}"\ntopic = "{{{settings.hash_tag}}}:{TOPIC}"'
    else:
        where = f'brokers = "{settings.brokers}"\ntopic = "{TOPIC}"'
    return (
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        f'[sources.{TOPIC}]\nkind = "{kind}"\n{where}\nservice = "{service}"\n'
        f"named_services = true\nchunk_rows = {CHUNK_ROWS}\n"
    )


def _forward(file: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `saf forward`, in a process group of its own, which a kill ends."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "saf", "forward", "--config", str(file)],
        env={**os.environ, **env},
        process_group=0,
        capture_output=True,
        text=True,
        check=False,
    )
