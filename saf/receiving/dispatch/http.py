"""The client: sends one request to an endpoint, and returns the meaning of its answer.

The client never raises because of an endpoint, whatever the endpoint does. Redirects are followed
only if the endpoint's settings allow it. An answer is read up to `MOST`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import unquote, urljoin, urlsplit

from saf.receiving.dispatch import http1, http2, replies
from saf.receiving.dispatch.calls import Call, Soap, XmlRpc
from saf.receiving.dispatch.credentials import NoToken, Tokens, authorization, hidden
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.replies import KEPT, Answer, Meaning, Reply, meaning_of, retry_after
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.transport import Exchange, Exchanged, NoAnswer
from saf.receiving.failures import HIDDEN
from saf.setaside.isolation import kept
from saf.signing.webhook import sign

MOST = 64 * 1024
"""Maximum number of bytes to read of an answer that is not sent back as a reply."""

UNAUTHORIZED = 401

REDIRECTS = 3
"""Maximum number of redirects to follow, if redirects are allowed."""


class Client:
    """Sends requests to one endpoint. Use it inside a running loop, as an async context.

    Raises:
        MissingExtra: the library of its transport is not installed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.call = _call(endpoint)
        """Protocol of the endpoint's requests and answers, if they are calls."""
        self._keys = endpoint.keys
        self._hidden = hidden(endpoint)
        self._authorization = authorization(endpoint)
        self._connections = (http2 if endpoint.http2 else http1).connections(endpoint)
        self._exchange: Exchange
        self._tokens = Tokens(endpoint) if endpoint.token_url is not None else None
        whole = endpoint.reply or self.call is not None
        self._most = replies.MOST + 1 if whole else MOST

    async def __aenter__(self) -> Client:
        self._exchange = await self._connections.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connections.__aexit__(None, None, None)

    async def post(self, request: Request) -> Answer:
        """Send a request; every outcome is an answer."""
        answer = await self._attempt(request)
        if self._tokens is not None and answer.status == UNAUTHORIZED:
            # the token may have been revoked: try once more, with a new one
            answer = await self._attempt(request)
        return answer

    async def _attempt(self, request: Request) -> Answer:
        began = time.monotonic()
        headers = {**request.headers, **self._authorization}
        if self._keys:
            headers |= sign(request.message_id, int(time.time()), request.body, self._keys)
        try:
            token = await self._token()
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            response = await self._answered(headers, request.body)
        except (NoAnswer, NoToken) as problem:
            seconds, reason = time.monotonic() - began, self._shown(str(problem))
            return Answer(meaning=Meaning.WAITS, seconds=seconds, error=reason)
        if response.status == UNAUTHORIZED and self._tokens is not None:
            self._tokens.forget(token)
        meaning, error = self._understand(response.status, response.body)
        reply = None
        if meaning is Meaning.DONE:
            try:
                reply = self._reply(response.body, response.headers)
            except Exception as problem:  # whatever error the endpoint's text causes
                meaning, error = Meaning.FAILED, f"its answer cannot be a reply: {problem}"
        done = meaning is Meaning.DONE
        return Answer(
            meaning=meaning,
            seconds=time.monotonic() - began,
            status=response.status,
            error=self._shown(error),
            retry_after=None if done else retry_after(response.headers),
            reply=reply,
        )

    async def _answered(self, headers: Mapping[str, str], body: bytes) -> Exchanged:
        """Send a body; return the answer of the endpoint, or of the redirect's target."""
        url, left = self.endpoint.url, REDIRECTS if self.endpoint.follow_redirects else 0
        while True:
            response = await self._exchange(url, headers, body, self._most)
            further = left and redirected(url, response.status, response.headers)
            if not further:
                return response
            url, left = further, left - 1

    async def _token(self) -> str | None:
        """Return the token to send, if any, and hide it from now on."""
        if self._tokens is None:
            return None
        token = await self._tokens.get(self._exchange)
        if (token, HIDDEN) not in self._hidden:
            # an answer to a request with the previous token may still come
            self._hidden = [*hidden(self.endpoint), *self._hidden[-1:], (token, HIDDEN)]
        return token

    def _shown(self, text: str) -> str:
        """Return a text on one line and without secrets, because an endpoint may repeat them."""
        if not text:
            return ""
        text = self._without_secrets(text)
        return " ".join(kept(text).split())

    def _without_secrets(self, text: str) -> str:
        """Return a text without secrets; the longest first, as one may be part of another."""
        for secret, shown in sorted(self._hidden, key=lambda pair: len(pair[0]), reverse=True):
            text = text.replace(secret, shown)
        return text

    def _understand(self, status: int, body: bytes) -> tuple[Meaning, str]:
        """Return the meaning of an answer, and its error."""
        if self.call is not None and (fault := self.call.fault(status, body)) is not None:
            return Meaning.FAILED, fault
        meaning = meaning_of(status, rejects=self.endpoint.client_errors == "reject")
        if meaning is not Meaning.DONE:
            # a secret may cross the end of the text to keep: remove secrets before cutting
            text = self._without_secrets(body.decode(errors="replace"))
            return meaning, said_by(status, text)
        if self.endpoint.reply and len(body) > replies.MOST:
            return Meaning.FAILED, f"its answer has more than {replies.MOST:,} bytes: no reply"
        return meaning, ""

    def _reply(self, body: bytes, headers: Mapping[str, str]) -> Reply | None:
        """Return the reply to send back; None if the answer has no body, or replies are off."""
        if not self.endpoint.reply or not body:
            return None
        content_type = headers.get("Content-Type")
        if self.call is not None:
            body, content_type = self.call.result(body), "application/json"
        ce_type = unquote(headers.get("ce-type", ""))
        return Reply(
            body=body,
            content_type=content_type,
            message_type=ce_type or self.endpoint.reply_type,
        )


def said_by(status: int, text: str) -> str:
    """Return an answer as text: its status and its first bytes.

    >>> said_by(503, "down for maintenance"), said_by(500, "")
    ('HTTP 503: down for maintenance', 'HTTP 500')
    """
    words = text.encode()[:KEPT].decode(errors="replace")
    return f"HTTP {status}: {words}" if words.strip() else f"HTTP {status}"


def redirected(url: str, status: int, headers: Mapping[str, str]) -> str | None:
    """Return the target of a redirect, if the same request may be sent there.

    >>> one = "http://a.example.com/hooks"
    >>> redirected(one, 307, {"Location": "/v2"})
    'http://a.example.com/v2'
    >>> redirected(one, 308, {"Location": "https://a.example.com/v2"})
    'https://a.example.com/v2'
    >>> redirected(one, 302, {"Location": "/v2"}), redirected(one, 307, {"Location": "//127.0.0.1"})
    (None, None)
    >>> print(redirected(one, 307, {"Location": "https://b.example.com/v2"}))
    None
    >>> print(redirected(one, 307, {"Location": "http://["}))
    None
    """
    if status not in (307, 308) or "Location" not in headers:
        return None
    try:
        to = urljoin(url, headers["Location"])
        before, after = urlsplit(url), urlsplit(to)
    except ValueError:  # not a URL
        return None
    same_origin = before.netloc == after.netloc and before.scheme == after.scheme
    now_by_tls = before.hostname == after.hostname and after.scheme == "https"
    return to if same_origin or now_by_tls else None


def _call(endpoint: Endpoint) -> Call | None:
    if endpoint.method is not None:
        return XmlRpc(endpoint.method)
    if endpoint.wsdl is not None and endpoint.operation is not None:
        return Soap(endpoint.wsdl, endpoint.operation)
    return None
