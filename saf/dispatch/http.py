"""The client: one request to an endpoint, and what its answer means.

It never raises because of an endpoint, whatever that does. Connections are kept. Redirects are not
followed unless the endpoint's settings say so, cookies are not kept, and a proxy of the environment
is not used. An answer is read up to `MOST`; nothing in it is unpacked, and the connection of a
longer one is closed. The timeout is for the whole request, so an endpoint that sends a byte now and
then does not extend it.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from saf.dispatch import replies
from saf.dispatch.answers import KEPT, Answer, Meaning, meaning_of, retry_after
from saf.dispatch.calls import Call
from saf.dispatch.credentials import authorization, hidden, of_proxy, tls
from saf.dispatch.envelope import Request
from saf.dispatch.guard import guarded_sockets
from saf.dispatch.replies import Reply
from saf.dispatch.settings import Endpoint
from saf.dispatch.soap import Soap
from saf.dispatch.tokens import NoToken, Tokens
from saf.dispatch.xmlrpc import XmlRpc
from saf.errors import MissingExtra
from saf.receiving.failures import HIDDEN
from saf.setaside.isolation import kept
from saf.signing.webhook import sign

if TYPE_CHECKING:
    import aiohttp

MOST = 64 * 1024
"""How many bytes of an answer are read that is not sent back."""

UNAUTHORIZED = 401

REDIRECTS = 3
"""How many redirects are followed at most, where they are."""

LARGE = 1 << 20
"""A body of more bytes than these is written in parts, so that other requests go on meanwhile."""

IDLE_SECONDS = 30.0
"""How long a connection is kept that nobody uses."""


class Client:
    """Sends requests to one endpoint. Use it inside of a running loop, as an async context.

    Raises:
        MissingExtra: aiohttp is not installed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import aiohttp
        except ImportError:
            raise MissingExtra("dispatch", "calling an endpoint") from None
        self._library = aiohttp
        self.endpoint = endpoint
        self.call = _call(endpoint)
        """How its requests are made and its answers read, where these are calls."""
        self._keys = endpoint.keys
        self._hidden = hidden(endpoint)
        self._authorization = authorization(endpoint)
        self._for_proxy = of_proxy(endpoint) or None
        self._tokens = Tokens(endpoint) if endpoint.token_url is not None else None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        library, endpoint = self._library, self.endpoint
        self._session = library.ClientSession(
            connector=library.TCPConnector(
                limit=endpoint.max_in_flight,
                keepalive_timeout=IDLE_SECONDS,
                ssl=tls(endpoint),
                socket_factory=(
                    guarded_sockets(endpoint.networks) if endpoint.public_only else None
                ),
            ),
            timeout=library.ClientTimeout(
                total=endpoint.timeout_seconds, sock_connect=endpoint.connect_seconds
            ),
            cookie_jar=library.DummyCookieJar(),
            proxy=endpoint.proxy,
            # these go to a proxy too
            headers={"User-Agent": "saf", "Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self._session is not None  # noqa: S101 - it was entered
        await self._session.close()

    async def post(self, request: Request) -> Answer:
        """Send a request; whatever comes of it is an answer."""
        answer = await self._attempt(request)
        if self._tokens is not None and answer.status == UNAUTHORIZED:
            # its token may have been withdrawn: once more, with another one
            answer = await self._attempt(request)
        return answer

    async def _attempt(self, request: Request) -> Answer:
        assert self._session is not None  # noqa: S101 - it was entered
        began = time.monotonic()
        body = request.body
        headers = {**request.headers, **self._authorization}
        if self._keys:
            headers |= sign(request.message_id, int(time.time()), body, self._keys)
        try:
            token = await self._token()
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            async with await self._response(body, headers) as response:
                if response.status == UNAUTHORIZED and self._tokens is not None:
                    self._tokens.forget(token)
                answer = await self._read(response)
                meaning, error = self._understand(response.status, answer)
                return Answer(
                    meaning=meaning,
                    seconds=time.monotonic() - began,
                    status=response.status,
                    error=self._shown(error),
                    retry_after=None if meaning is Meaning.DONE else retry_after(response.headers),
                    reply=self._reply(answer, response.headers)
                    if meaning is Meaning.DONE
                    else None,
                )
        except Exception as problem:
            said = self._problem(problem)
            if said is None:
                raise
        seconds = time.monotonic() - began
        return Answer(meaning=Meaning.WAITS, seconds=seconds, error=self._shown(said))

    async def _response(self, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Send a body; return the answer of the endpoint, or of where it leads to."""
        assert self._session is not None  # noqa: S101 - it was entered
        url, left = self.endpoint.url, REDIRECTS if self.endpoint.follow_redirects else 0
        while True:
            data = body if len(body) <= LARGE else io.BytesIO(body)
            response = await self._session.post(
                url,
                data=data,
                headers=headers,
                allow_redirects=False,
                proxy_headers=self._for_proxy,
            )
            further = left and redirected(url, response.status, response.headers)
            if not further:
                return response
            response.release()
            url, left = further, left - 1

    async def _token(self) -> str | None:
        """The token to send, if there are any; from now on, nobody may see it."""
        if self._tokens is None:
            return None
        assert self._session is not None  # noqa: S101 - it was entered
        token = await self._tokens.get(self._session)
        if (token, HIDDEN) not in self._hidden:
            # an answer to a request with the token before may still come
            self._hidden = [*hidden(self.endpoint), *self._hidden[-1:], (token, HIDDEN)]
        return token

    def _problem(self, problem: Exception) -> str | None:
        """What went wrong with a request, in words; None if that is not the network's fault."""
        library, endpoint = self._library, self.endpoint
        match problem:
            case library.ConnectionTimeoutError():
                said = f"cannot connect within {endpoint.connect_seconds:g} s"
            case TimeoutError():
                said = f"no answer within {endpoint.timeout_seconds:g} s"
            case library.ClientConnectorCertificateError():
                said = f"its certificate is refused: {problem.certificate_error}"
            case library.ClientConnectorError():
                said = f"cannot connect: {problem.os_error.strerror or problem.os_error}"
            case library.ClientResponseError():
                said = f"no answer in HTTP: {problem.message}"  # its text has the URL
            case NoToken():
                said = str(problem)
            case library.ClientError() | OSError() | ValueError() | EOFError():
                said = f"no answer: {type(problem).__name__}: {problem}"
            case _:
                return None
        return said

    def _shown(self, text: str) -> str:
        """A text on one line, and without what nobody may see: an endpoint may repeat it."""
        if not text:
            return ""
        for secret, shown in self._hidden:
            text = text.replace(secret, shown)
        return " ".join(kept(text).split())

    def _understand(self, status: int, body: bytes) -> tuple[Meaning, str]:
        """What an answer means, and what is wrong with it."""
        if self.call is not None and (fault := self.call.fault(status, body)) is not None:
            return Meaning.FAILED, fault
        meaning = meaning_of(status, rejects=self.endpoint.client_errors == "reject")
        if meaning is not Meaning.DONE:
            return meaning, said_by(status, body)
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

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the answer to its end, so that the connection can be kept; of a long one, a part."""
        body = bytearray()
        most = replies.MOST + 1 if self.endpoint.reply or self.call is not None else MOST
        while len(body) < most:
            some = await response.content.read(most - len(body))
            if not some:
                return bytes(body)
            body += some
        response.close()
        return bytes(body)


def said_by(status: int, head: bytes) -> str:
    """An answer in words: its status and its first bytes.

    >>> said_by(503, b"down for maintenance"), said_by(500, b"")
    ('HTTP 503: down for maintenance', 'HTTP 500')
    """
    words = head[:KEPT].decode(errors="replace")
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
    """
    if status not in (307, 308) or "Location" not in headers:
        return None
    to = urljoin(url, headers["Location"])
    before, after = urlsplit(url), urlsplit(to)
    same = before.netloc == after.netloc and before.scheme == after.scheme
    now_by_tls = before.hostname == after.hostname and after.scheme == "https"
    return to if same or now_by_tls else None


def _call(endpoint: Endpoint) -> Call | None:
    if endpoint.method is not None:
        return XmlRpc(endpoint.method)
    if endpoint.wsdl is not None and endpoint.operation is not None:
        return Soap(endpoint.wsdl, endpoint.operation)
    return None
