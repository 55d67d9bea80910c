"""The pages: one file per subject, with its queries and its display."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.responses import Response

from saf.ui.pages import brokers, dialogs, messages, overview, set_aside
from saf.ui.site import Visit


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page, or the action of a form."""

    page: Callable[[Visit], Response]
    changes: bool = False
    """True for the action of a form: a POST with the CSRF token."""
    operates: bool = False
    """True if only operators may use it."""


PAGES: Mapping[str, Page] = {
    "/": Page(page=overview.overview),
    "/nav": Page(page=overview.nav),
    "/charts": Page(page=overview.charts),
    "/pending": Page(page=overview.pending),
    "/outbox": Page(page=messages.sent),
    "/message": Page(page=messages.message),
    "/parked": Page(page=set_aside.lanes),
    "/parked/confirm": Page(page=set_aside.confirm_retry, operates=True),
    "/parked/retry": Page(page=set_aside.retry, changes=True, operates=True),
    "/parked/messages": Page(page=set_aside.PARKED.messages),
    "/parked/messages/groups": Page(page=set_aside.PARKED.groups),
    "/parked/messages/confirm": Page(page=set_aside.PARKED.confirm, changes=True, operates=True),
    "/parked/messages/decide": Page(page=set_aside.PARKED.decide, changes=True, operates=True),
    "/dead": Page(page=set_aside.DEAD.messages),
    "/dead/groups": Page(page=set_aside.DEAD.groups),
    "/dead/confirm": Page(page=set_aside.DEAD.confirm, changes=True, operates=True),
    "/dead/decide": Page(page=set_aside.DEAD.decide, changes=True, operates=True),
    "/held": Page(page=set_aside.HELD.messages),
    "/held/confirm": Page(page=set_aside.HELD.confirm, changes=True, operates=True),
    "/held/decide": Page(page=set_aside.HELD.decide, changes=True, operates=True),
    "/jobs": Page(page=set_aside.jobs),
    "/jobs/{number}": Page(page=set_aside.job),
    "/jobs/{number}/cancel": Page(page=set_aside.cancel, changes=True, operates=True),
    "/routes": Page(page=brokers.routes),
    "/members": Page(page=brokers.members),
    "/doctor": Page(page=brokers.findings),
    "/doctor/examine": Page(page=brokers.examine_, changes=True),
    "/dialogs": Page(page=dialogs.list_),
    "/dialog": Page(page=dialogs.one),
    "/audit": Page(page=set_aside.audit),
}
