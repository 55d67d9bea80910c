"""`saf ui` in a round, and a visitor who reads its pages, and lets what is parked be tried at once.

The dashboard asks the round's brokers, whatever happens to them, and is killed itself. The visitor
gets a page, or an honest word that a database does not answer. Anything else is a finding.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from saf.cli.ui import prepared
from saf.config import load
from tests.crash import set_backs
from tests.crash.plan import Fault
from tests.dashboard import OPERATE, Visitor
from tests.processes import start

if TYPE_CHECKING:
    from tests.crash.rounds import Round, Started

PAGES = (
    "/charts",
    "/pending",
    "/outbox",
    "/held",
    "/parked",
    "/",
    "/parked/messages",
    "/dead",
    "/nav",
    "/dialogs",
    "/routes",
    "/members",
    "/audit",
    "/doctor",
)
HONEST = ("is unavailable", "does not answer")
"""What a page of status 503 says of a database that does not answer."""
ANSWERED_SECONDS = 30.0
PAUSE_SECONDS = 0.05


def start_dashboard(round_: Round) -> Started:
    """With a saf.toml of its own, and somebody who may operate."""
    file = set_backs.configure(round_, "ui.toml")
    with file.open("a") as more:
        more.write(f'[ui]\noperate_token = "{OPERATE}"\n')
    return start(dashboard, file, round_.port), lambda: start_dashboard(round_)


def start_visitor(round_: Round) -> Started:
    """Who goes to the round's dashboard, whichever it is."""
    return start(visitor, round_.port, round_.answers), lambda: start_visitor(round_)


def dashboard(file: Path, port: int) -> None:
    """``saf ui``, until it is killed."""
    with Path(os.devnull).open("w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    server, listening, _ = prepared(load(file), host="127.0.0.1", port=port, write=True)
    server.run(sockets=[listening])


def visitor(port: int, said: Path) -> None:
    """Visit for ever; what was answered wrongly goes to a file."""
    while True:
        # nobody is there for a moment, or not any more
        with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
            for path, answer in visit(f"http://127.0.0.1:{port}"):
                if why := wrong(answer):
                    with said.open("a") as file:
                        file.write(f"{path}: {why}\n")
        time.sleep(PAUSE_SECONDS)


def visit(url: str) -> Iterator[tuple[str, httpx.Response | None]]:
    """Answers, each with the path, until the login is over; None for one that never came."""
    with Visitor(base_url=url, timeout=ANSWERED_SECONDS) as client:
        client.post("/login", data={"token": OPERATE, "name": "visitor"})
        while True:
            for path in PAGES:
                try:
                    answer = client.get(path)
                except httpx.TimeoutException:
                    yield path, None
                    return
                if answer.status_code == httpx.codes.SEE_OTHER:
                    return  # another dashboard knows nobody
                yield path, answer
                time.sleep(PAUSE_SECONDS)
            yield "/parked/retry", client.form("/parked", "/parked/retry", {"why": "impatient"})


def wrong(answer: httpx.Response | None) -> str:
    """Why somebody should not have been answered so; empty if all is well."""
    if answer is None:
        return f"no answer in {ANSWERED_SECONDS:.0f} s"
    honest = answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and any(
        words in answer.text for words in HONEST
    )
    if not answer.is_server_error or honest:
        return ""
    return f"{answer.status_code}: {' '.join(answer.text.split())[:200]}"


def kill_ui(round_: Round, fault: Fault) -> None:
    """In the middle of its answers; another one takes its place."""
    round_.again(round_.dashboards, fault.target)
