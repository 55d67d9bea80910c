"""A dashboard that is served, and who visits it: by HTTP alone, or by a browser."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

import saf.ui
from saf.config import Settings, load
from saf.database import Dsn, fetch
from saf.ui.site import Site
from tests.pipeline import connect
from tests.waits import until

VIEW, OPERATE = "only-looking-around", "correct-horse-battery"


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A dashboard at an address of this machine."""

    url: str
    site: Site
    visitors: ExitStack
    """Closes their connections."""

    def client(self, token: str | None = OPERATE, name: str = "ann") -> Visitor:
        """Return a visitor, who is logged in if there is a token."""
        visitor = self.visitors.enter_context(Visitor(base_url=self.url, timeout=60))
        if token is not None:
            answer = visitor.post("/login", data={"token": token, "name": name})
            assert answer.status_code == 303, answer.text
        return visitor


class Visitor(httpx.Client):
    """Who sends forms as a browser does: with the CSRF token of the page."""

    def form(self, page: str, action: str, data: Mapping[str, Any]) -> httpx.Response:
        """Send a form of a page."""
        return self.post(action, data={"csrf": self.csrf(page), **data}, follow_redirects=True)

    def csrf(self, page: str) -> str:
        """Return the CSRF token of a page."""
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.get(page).text)
        assert found is not None
        return found[1]

    def counted(self, action: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Take the first step of a decision; return the form of the second one."""
        page = self.form("/dead", "/dead/confirm", {"action": action, **data})
        assert page.status_code == 200, page.text
        fields: dict[str, Any] = {}
        for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', page.text):
            fields.setdefault(name, []).append(value)
        return fields


def settings(
    file: Path, brokers: Mapping[str, Dsn], destinations: Mapping[str, Dsn], ui: str = ""
) -> Settings:
    """Write a saf.toml with a dashboard, and read it."""
    lines = ["[forwarder]", f'default_destination = "{next(iter(destinations))}"']
    for kind, places in (("brokers", brokers), ("destinations", destinations)):
        for name, dsn in places.items():
            lines += [f'[{kind}."{name}"]', f'dsn = "{dsn.conninfo}"']
    lines += ["[ui]", f'token = "{VIEW}"', f'operate_token = "{OPERATE}"', ui]
    file.write_text("\n".join(lines))
    return load(file)


@contextmanager
def served(application: ASGIApp, site: Site, path: str = "") -> Iterator[Dashboard]:
    """Serve an application in a thread."""
    config = uvicorn.Config(
        application,
        host="127.0.0.1",
        port=0,
        proxy_headers=False,
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="dashboard")
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        with ExitStack() as visitors:
            url = f"http://127.0.0.1:{port}{path}"
            yield Dashboard(url=url, site=site, visitors=visitors)
    finally:
        server.should_exit = True
        thread.join(60)
        site.close()


@contextmanager
def dashboard(given: Settings, *, write: bool = True) -> Iterator[Dashboard]:
    """Serve a dashboard."""
    application: Any = saf.ui.app(given, write=write)
    with served(application, application.state.site) as there:
        yield there


def finished(visitor: Visitor, job: str, seconds: float = 60) -> str:
    """Wait until a job is over; return its page."""
    began = time.monotonic()
    while True:
        page = visitor.get(job).text
        if 'hx-trigger="every 1s"' not in page:
            return page
        assert time.monotonic() - began < seconds, "the job does not end"
        time.sleep(0.05)


def message_id(app: Dsn, key: str) -> str:
    """The message id of the message with a key."""
    with connect(app) as connection:
        ((found,),) = fetch(
            connection, "SELECT message_id::text FROM saf.outbox WHERE key = %(key)s", {"key": key}
        )
    return str(found)
