"""The client: one request to an endpoint, and what its answer means.

It never raises because of an endpoint, whatever that does. Redirects are not followed unless the
endpoint's settings say so. An answer is read up to `MOST`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import unquote, urljoin, urlsplit

from saf.dispatch import replies
from saf.dispatch.answers import KEPT, Answer, Meaning, meaning_of, retry_after
from saf.dispatch.calls import Call
from saf.dispatch.credentials import authorization, hidden
from saf.dispatch.envelope import Request
from saf.dispatch.http1 import Http1
from saf.dispatch.http2 import Http2
from saf.dispatch.replies import Reply
from saf.dispatch.settings import Endpoint
from saf.dispatch.soap import Soap
from saf.dispatch.tokens import NoToken, Tokens
from saf.dispatch.transport import Exchanged, NoAnswer, Transport
from saf.dispatch.xmlrpc import XmlRpc
from saf.receiving.failures import HIDDEN
from saf.setaside.isolation import kept
from saf.signing.webhook import sign

MOST = 64 * 1024
"""How many bytes of an answer are read that is not sent back."""

UNAUTHORIZED = 401

REDIRECTS = 3
"""How many redirects are followed at most, where they are."""


class Client:
    """Sends requests to one endpoint. Use it inside of a running loop, as an async context.

    Raises:
        MissingExtra: the library of its transport is not installed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.call = _call(endpoint)
        """How its requests are made and its answers read, where these are calls."""
        self._keys = endpoint.keys
        self._hidden = hidden(endpoint)
        self._authorization = authorization(endpoint)
        self._transport: Transport = Http2(endpoint) if endpoint.http2 else Http1(endpoint)
        self._tokens = Tokens(endpoint) if endpoint.token_url is not None else None
        whole = endpoint.reply or self.call is not None
        self._most = replies.MOST + 1 if whole else MOST

    async def __aenter__(self) -> Client:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self._transport.__aexit__(*ended)

    async def post(self, request: Request) -> Answer:
        """Send a request; whatever comes of it is an answer."""
        answer = await self._attempt(request)
        if self._tokens is not None and answer.status == UNAUTHORIZED:
            # its token may have been withdrawn: once more, with another one
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
            got = await self._exchange(headers, request.body)
        except (NoAnswer, NoToken) as problem:
            seconds, said = time.monotonic() - began, self._shown(str(problem))
            return Answer(meaning=Meaning.WAITS, seconds=seconds, error=said)
        if got.status == UNAUTHORIZED and self._tokens is not None:
            self._tokens.forget(token)
        meaning, error = self._understand(got.status, got.body)
        reply = None
        if meaning is Meaning.DONE:
            try:
                reply = self._reply(got.body, got.headers)
            except Exception as problem:  # whatever the endpoint has written
                meaning, error = Meaning.FAILED, f"its answer cannot be a reply: {problem}"
        done = meaning is Meaning.DONE
        return Answer(
            meaning=meaning,
            seconds=time.monotonic() - began,
            status=got.status,
            error=self._shown(error),
            retry_after=None if done else retry_after(got.headers),
            reply=reply,
        )

    async def _exchange(self, headers: Mapping[str, str], body: bytes) -> Exchanged:
        """Send a body; return the answer of the endpoint, or of where it leads to."""
        url, left = self.endpoint.url, REDIRECTS if self.endpoint.follow_redirects else 0
        while True:
            got = await self._transport.post(url, headers, body, self._most)
            further = left and redirected(url, got.status, got.headers)
            if not further:
                return got
            url, left = further, left - 1

    async def _token(self) -> str | None:
        """The token to send, if there are any; from now on, nobody may see it."""
        if self._tokens is None:
            return None
        token = await self._tokens.get(self._transport)
        if (token, HIDDEN) not in self._hidden:
            # an answer to a request with the token before may still come
            self._hidden = [*hidden(self.endpoint), *self._hidden[-1:], (token, HIDDEN)]
        return token

    def _shown(self, text: str) -> str:
        """A text on one line, and without what nobody may see: an endpoint may repeat it."""
        if not text:
            return ""
        text = self._without_secrets(text)
        return " ".join(kept(text).split())

    def _without_secrets(self, text: str) -> str:
        """A text without what nobody may see; the longest first, as one may be part of another."""
        for secret, shown in sorted(self._hidden, key=lambda one: len(one[0]), reverse=True):
            text = text.replace(secret, shown)
        return text

    def _understand(self, status: int, body: bytes) -> tuple[Meaning, str]:
        """What an answer means, and what is wrong with it."""
        if self.call is not None and (fault := self.call.fault(status, body)) is not None:
            return Meaning.FAILED, fault
        meaning = meaning_of(status, rejects=self.endpoint.client_errors == "reject")
        if meaning is not Meaning.DONE:
            # a secret may lie across the end of what is kept: it goes before the rest is cut off
            said = self._without_secrets(body.decode(errors="replace"))
            return meaning, said_by(status, said)
        if self.endpoint.reply and len(body) > replies.MOST:
            return Meaning.FAILED, f"its answer has more than {replies.MOST:,} bytes: no reply"
        return meaning, ""

    def _reply(self, body: bytes, headers: Mapping[str, str]) -> Reply | None:
        """What is to be sent back; None if the answer has no body, or nobody wants one."""
        if not self.endpoint.reply or not body:
            return None
        content_type = headers.get("Content-Type")
        if self.call is not None:
            body, content_type = self.call.result(body), "application/json"
        said = unquote(headers.get("ce-type", ""))
        return Reply(
            body=body,
            content_type=content_type,
            message_type=said or self.endpoint.reply_type,
        )


def said_by(status: int, text: str) -> str:
    """An answer in words: its status and its first bytes.

    >>> said_by(503, "down for maintenance"), said_by(500, "")
    ('HTTP 503: down for maintenance', 'HTTP 500')
    """
    words = text.encode()[:KEPT].decode(errors="replace")
    return f"HTTP {status}: {words}" if words.strip() else f"HTTP {status}"


def redirected(url: str, status: int, headers: Mapping[str, str]) -> str | None:
    """Where an answer leads to, if one may go there with the same request.

    >>> one = "http://a.example.com/hooks"
    >>> redirected(one, 307, {"Location": "/v2"})
    'http://a.example.com/v2'
    >>> redirected(one, 308, {"Location": "https://a.example.com/v2"})
    'https://a.example.com/v2'
    >>> redirected(one, 302, {"Location": "/v2"}), redirected(one, 307, {"Location": "//127.0.0.1"})
    (None, None)
    >>> print(redirected(one, 307, {"Location": "http://["}))
    None
    """
    if status not in (307, 308) or "Location" not in headers:
        return None
    try:
        to = urljoin(url, headers["Location"])
        before, after = urlsplit(url), urlsplit(to)
    except ValueError:  # it is no URL
        return None
    same = before.netloc == after.netloc and before.scheme == after.scheme
    now_by_tls = before.hostname == after.hostname and after.scheme == "https"
    return to if same or now_by_tls else None


def _call(endpoint: Endpoint) -> Call | None:
    if endpoint.method is not None:
        return XmlRpc(endpoint.method)
    if endpoint.wsdl is not None and endpoint.operation is not None:
        return Soap(endpoint.wsdl, endpoint.operation)
    return None
