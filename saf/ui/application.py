"""The application: addresses of pages, access to them, processing of forms, and live streams.

A page is a function of a visit. It runs in a thread, because it queries databases. Visitors who are
not logged in are redirected to the login, and afterwards to the page they wanted, within this
dashboard only. Changes need a POST with the session's CSRF token, from the same origin, by a
visitor who may operate. Logins, logouts, wrong tokens and refusals are logged; tokens are not.

An open page holds a stream of server-sent events, which tell it when to reload itself. An event
only signals that new figures exist. A page loads them from its own address, with its own filters,
so its content is the same with and without JavaScript.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from saf.config import Settings
from saf.errors import SafError, Unavailable
from saf.operating.wording import shown
from saf.telemetry.logger import Log
from saf.ui.access import Attempts, Guarded, KnownHosts, Visitor
from saf.ui.pages import PAGES
from saf.ui.rendering import STATIC
from saf.ui.site import Site, Visit

Page = Callable[[Visit], Response]
Endpoint = Callable[[Request], Awaitable[Response]]

MOST_BYTES = 1 << 20
"""Size of the largest form, in bytes."""
WRONG_TOKEN_SECONDS = 0.5
"""Delay of the answer to a wrong token, in seconds."""

log = Log("saf.ui")


class Refused(Exception):
    """A request is refused, with a status and a reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def application(settings: Settings, *, write: bool) -> ASGIApp:
    """Return the dashboard; see `saf.ui.app`."""
    site = Site(settings, write=write)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        site.pulse.start()  # so that the charts have a past when somebody looks
        yield
        await run_in_threadpool(site.close)

    routes = [
        Route("/login", _login(site), methods=["GET", "POST"]),
        Route("/logout", _logout(site), methods=["POST"]),
        Route("/live", _live(site), methods=["GET"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    for path, endpoint in PAGES.items():
        methods = ["POST"] if endpoint.changes else ["GET"]
        routes.append(
            Route(path, _endpoint(site, endpoint.page, operates=endpoint.operates), methods=methods)
        )
    known = settings.ui.user_header is not None
    app = _Guarded(
        routes=routes,
        middleware=[Middleware(KnownHosts, hosts=settings.ui.hosts)] if known else [],
        lifespan=lifespan,
        exception_handlers={404: _not_found(site)},
    )
    app.state.site = site
    return app


class _Guarded(Starlette):
    """An application that adds security headers to every response, even to unexpected failures."""

    def build_middleware_stack(self) -> ASGIApp:
        return Guarded(super().build_middleware_stack())


def _endpoint(site: Site, page: Page, *, operates: bool) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        visitor = site.access.visitor(request)
        if visitor is None:
            return _to_login(request)
        visit = Visit(site=site, request=request, visitor=visitor)
        try:
            if request.method == "POST":
                visit.form = await _form(request)
                _check(site, request, visitor, visit.form)
            if operates:
                _check_role(site, visitor)
            return await run_in_threadpool(page, visit)
        except Refused as refused:
            log.warning(
                "request_refused",
                person=shown(visitor.name),
                path=shown(visit.here),
                why=str(refused),
            )
            return await _problem(visit, refused.status, str(refused))
        except Unavailable as error:
            return await _problem(visit, 503, str(error))
        except SafError as error:
            return await _problem(visit, 400, str(error))

    return endpoint


async def _problem(visit: Visit, status: int, reason: str) -> Response:
    return await run_in_threadpool(
        lambda: visit.page(
            "problem.html",
            status=status,
            number=status,
            why=reason,
            changes=visit.request.method == "POST",
        )
    )


async def _form(request: Request) -> Mapping[str, Sequence[str]]:
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise Refused(413, "the form is too large: choose by a filter instead")
    except ClientDisconnect:
        raise Refused(400, "the form is incomplete") from None
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=10_000)
    except ValueError:
        raise Refused(400, "this form is not part of the dashboard") from None


def _check(
    site: Site, request: Request, visitor: Visitor, form: Mapping[str, Sequence[str]]
) -> None:
    _check_origin(request)
    if not site.access.right_csrf(visitor, form.get("csrf", [""])[-1]):
        raise Refused(
            403, "this form belongs to another session: go back, reload the page, try again"
        )


def _check_role(site: Site, visitor: Visitor) -> None:
    if not visitor.operates:
        reason = "this login may view, and not operate"
        raise Refused(403, reason if site.write else "`saf ui` was started without --write")


def _check_origin(request: Request) -> None:
    """Reject a form that the browser reports to be from another site."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Refused(403, "this form comes from another site")


def _to_login(request: Request) -> Response:
    base = request.scope.get("root_path", "")
    if request.headers.get("hx-request"):  # from a page that is still open
        return Response(status_code=401, headers={"HX-Refresh": "true"})
    if request.method == "POST":
        return RedirectResponse(f"{base}/login", status_code=303)
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"{base}/login?next={quote(wanted, safe='')}", status_code=303)


def within(base: str, wanted: str | None) -> str:
    r"""Return the address after a login, which must be within this dashboard.

    >>> within("/saf", "/saf/dead?key=a"), within("", "//evil.example/"), within("", "/\\evil")
    ('/saf/dead?key=a', '/', '/')
    >>> within("/saf", "/safe/"), within("", "https://evil.example/"), within("", None)
    ('/saf/', '/', '/')
    """
    home = f"{base}/"
    if not wanted or not wanted.startswith(home) or not wanted.isprintable():
        return home
    if wanted.startswith("//") or "\\" in wanted or urlsplit(wanted).netloc:
        return home
    return wanted


def _login(site: Site) -> Endpoint:
    attempts = Attempts()

    async def endpoint(request: Request) -> Response:
        base = request.scope.get("root_path", "")
        wanted, wrong = request.query_params.get("next"), ""
        status, address = 200, site.access.address(request)
        if request.method == "POST":
            try:
                _check_origin(request)
                form = await _form(request)
            except Refused as refused:
                return PlainTextResponse(str(refused), status_code=refused.status)
            wait = attempts.wait_seconds(address, time.monotonic())
            if wait > 0:
                log.warning("login_not_listened_to", address=shown(address))
                text = f"too many wrong tokens: try again in {math.ceil(wait)} s"
                headers = {"Retry-After": str(math.ceil(wait))}
                return PlainTextResponse(text, status_code=429, headers=headers)
            wanted = form.get("next", [""])[-1]
            token, name = form.get("token", [""])[-1], form.get("name", [""])[-1]
            site.access.logout(request)
            number = site.access.login(token.strip(), name)
            if number is not None:
                log.info("login", person=shown(name), address=shown(address))
                answer = RedirectResponse(within(base, wanted), status_code=303)
                answer.set_cookie(
                    site.access.cookie(request),
                    number,
                    path=base or "/",
                    httponly=True,
                    samesite="lax",
                    secure=site.access.secure(request),
                )
                return answer
            attempts.wrong(address, time.monotonic())
            log.warning("login_refused", person=shown(name), address=shown(address))
            await asyncio.sleep(WRONG_TOKEN_SECONDS)
            wrong, status = "That is not the token.", 401
        page = site.environment.get_template("login.html").render(
            base=base, next=within(base, wanted), wrong=wrong, by_token=site.access.by_token
        )
        return HTMLResponse(page, status_code=status)

    return endpoint


def _logout(site: Site) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        base = request.scope.get("root_path", "")
        visitor = site.access.visitor(request)
        if visitor is not None:
            try:
                _check(site, request, visitor, await _form(request))
            except Refused as refused:
                return PlainTextResponse(str(refused), status_code=refused.status)
            site.access.logout(request)
            log.info("logout", person=shown(visitor.name))
        answer = RedirectResponse(f"{base}/login", status_code=303)
        secure = site.access.secure(request)
        answer.delete_cookie(site.access.cookie(request), path=base or "/", secure=secure)
        return answer

    return endpoint


def _not_found(site: Site) -> Callable[[Request, Any], Awaitable[Response]]:
    async def handler(request: Request, _: Any) -> Response:
        visitor = site.access.visitor(request)
        if visitor is None:
            return PlainTextResponse("not found", status_code=404)
        visit = Visit(site=site, request=request, visitor=visitor)
        return await _problem(visit, 404, "Page not found.")

    return handler


LOOK_SECONDS = 0.5
LONGEST_SECONDS = 300.0
"""Longest duration of a stream. The browser then opens another, which checks the login again."""
MOST_STREAMS = 200
"""Most streams at a time."""


def _live(site: Site) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of the stream."""
    streams = 0

    async def stream(request: Request) -> AsyncIterator[str]:
        nonlocal streams
        streams += 1
        try:
            seen = site.pulse.number
            loop = asyncio.get_running_loop()
            end = loop.time() + LONGEST_SECONDS
            yield "retry: 3000\n\n"
            while loop.time() < end and not (site.ending or site.pulse.over):
                if site.access.visitor(request) is None:
                    return
                if site.pulse.number != seen:
                    seen = site.pulse.number
                    yield f"event: tick\ndata: {seen}\n\n"
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            streams -= 1

    async def answer(request: Request) -> Response:
        if site.access.visitor(request) is None:
            return Response(status_code=401)
        if streams >= MOST_STREAMS:
            return Response(status_code=503)
        return StreamingResponse(
            stream(request),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return answer
