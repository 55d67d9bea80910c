"""The site: state shared by all pages of a dashboard, and one visit to a page with its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from saf.config import Settings
from saf.destinations.identities import Identities
from saf.errors import ConfigurationError, UsageError
from saf.operating.places import Places
from saf.telemetry import metrics as m
from saf.ui.access import Access, Visitor
from saf.ui.beat import Beat
from saf.ui.brokers import Brokers
from saf.ui.jobs import Jobs
from saf.ui.pulse import Pulse
from saf.ui.redaction import Redaction
from saf.ui.rendering import environment


class Site:
    """One dashboard."""

    def __init__(self, settings: Settings, *, write: bool) -> None:
        ui = settings.ui
        self.settings = settings
        self.write = write
        self.access = Access(ui, write=write)
        self.redaction = Redaction(ui)
        if not self.access.by_token and ui.user_header is None:
            raise ConfigurationError(
                "nobody could log in: set token, operate_token or user_header under [ui] in "
                "saf.toml; `saf ui` alone generates a token"
            )
        places = Places(settings, None)
        self.brokers = Brokers(places, settings.destinations.keys() - settings.brokers.keys())
        self.pulse = Pulse(settings, places)
        self.jobs = Jobs()
        self.identities = Identities(settings.destinations)
        self.environment = environment()
        self.examination: Any = None
        self.ending = False
        """True if background work should end."""

    def close(self) -> None:
        """Stop queries, and stop jobs after their current chunks."""
        self.pulse.stop()
        self.brokers.close()
        self.jobs.stop()


LIVE = "sse:tick"
"""Trigger of pages that show the figures: fires when new ones exist."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A page in the navigation."""

    at: str
    label: str
    here: bool
    count: float = 0
    colour: str = ""


def navigation(beat: Beat, here: str) -> list[Link]:
    """Return the navigation, with counts of what needs attention."""
    counts = {
        "/": (len(beat.down), "bad"),
        "/parked": (beat.total(m.PARKED), "warn"),
        "/dead": (beat.total(m.DEAD), "bad"),
        "/held": (beat.total(m.REFUSED), "bad"),
    }
    return [
        Link(
            at=path,
            label=label,
            here=here == path or (path != "/" and here.startswith(path.rstrip("s"))),
            count=counts.get(path, (0, ""))[0],
            colour=counts.get(path, (0, ""))[1],
        )
        for path, label in NAVIGATION.items()
    ]


NAVIGATION = {
    "/": "Overview",
    "/charts": "Charts",
    "/pending": "Pending",
    "/held": "Held",
    "/parked": "Parked",
    "/dead": "Dead letters",
    "/outbox": "Outbox",
    "/message": "Message",
    "/routes": "Routes",
    "/members": "Members",
    "/dialogs": "Dialogs",
    "/doctor": "Doctor",
    "/jobs": "Jobs",
    "/audit": "Audit",
}


@dataclass(kw_only=True)
class Visit:
    """One request of a logged-in user."""

    site: Site
    request: Request
    visitor: Visitor
    form: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def query(self) -> QueryParams:
        """Parameters of the address."""
        return self.request.query_params

    @cached_property
    def beat(self) -> Beat:
        """Last figures of all brokers."""
        return self.site.pulse.look()

    @property
    def here(self) -> str:
        """Address of the page within this dashboard, without parameters."""
        return self.request.url.path.removeprefix(self.request.scope.get("root_path", ""))

    def given(self, name: str) -> str | None:
        """Return a field of the form or a parameter of the address; None if it is empty."""
        return (self.form.get(name, [""])[-1] or self.query.get(name) or "").strip() or None

    def path(self, path: str, **params: object) -> str:
        """Return an address within this dashboard, wherever it is mounted."""
        given = {name: value for name, value in params.items() if value not in (None, "")}
        query = f"?{urlencode(given)}" if given else ""
        return f"{self.request.scope.get('root_path', '')}{path}{query}"

    def to(self, path: str, **params: object) -> Response:
        """Redirect the browser after an action."""
        return RedirectResponse(self.path(path, **params), status_code=303)

    def page(
        self, template: str, *, status: int = 200, live: str = "", **shown: object
    ) -> HTMLResponse:
        """Render a page; ``live`` is the htmx trigger on which its content is fetched again."""
        beat = self.beat
        page = self.site.environment.get_template(template).render(
            visitor=self.visitor,
            path=self.path,
            live=live,
            nav=navigation(beat, self.here),
            beat=beat,
            here=self.here,
            address=str(self.request.url.path)
            + (f"?{self.request.url.query}" if self.request.url.query else ""),
            names=self.site.brokers.names(),
            **shown,
        )
        return HTMLResponse(page, status_code=status)

    def part(self, template: str, **shown: object) -> HTMLResponse:
        """Render a part of a page."""
        compiled = self.site.environment.get_template(template)
        return HTMLResponse(compiled.render(path=self.path, here=self.given("here"), **shown))


def moment_of(text: str | None) -> datetime | None:
    """Return a point in time; without an offset, it is in this machine's time zone.

    >>> moment_of("2026-01-31T13:00:00+01:00").timestamp()
    1769860800.0
    >>> moment_of(None)
    """
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a time such as 2026-01-31T12:00:00Z") from None


def number_of(text: str | None) -> int | None:
    """Return a number as the pages write it.

    >>> number_of("12"), number_of(None)
    (12, None)
    """
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 - of a bigint
        raise UsageError(f"{text!r} is not a valid number")
    return int(text)
