"""The client: one request to an endpoint, and what its answer means.

It never raises because of an endpoint, whatever that does. Connections are kept. Redirects are not
followed, cookies are not kept, and a proxy of the environment is not used. An answer is read up to
`MOST`; nothing in it is unpacked, and the connection of a longer one is closed. The
timeout is for the whole request, so an endpoint that sends a byte now and then does not extend it.
"""

from __future__ import annotations

import base64
import io
import ssl
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from saf.dispatch import replies, xmlrpc
from saf.dispatch.answers import KEPT, Answer, Meaning, meaning_of, retry_after
from saf.dispatch.envelope import Request
from saf.dispatch.guard import guarded_sockets
from saf.dispatch.replies import Reply
from saf.dispatch.settings import Endpoint
from saf.errors import ConfigurationError, MissingExtra
from saf.receiving.failures import HIDDEN, SHORTEST
from saf.setaside.isolation import kept
from saf.webhooks.signature import sign

if TYPE_CHECKING:
    import aiohttp

MOST = 64 * 1024
"""How many bytes of an answer are read that is not sent back."""

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
        self._keys = endpoint.keys
        self._hidden = _hidden(endpoint)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        library, endpoint = self._library, self.endpoint
        self._session = library.ClientSession(
            connector=library.TCPConnector(
                limit=endpoint.max_in_flight,
                keepalive_timeout=IDLE_SECONDS,
                ssl=_tls(endpoint),
                socket_factory=(
                    guarded_sockets(endpoint.networks) if endpoint.public_only else None
                ),
            ),
            timeout=library.ClientTimeout(
                total=endpoint.timeout_seconds, sock_connect=endpoint.connect_seconds
            ),
            cookie_jar=library.DummyCookieJar(),
            headers={
                "User-Agent": "saf",
                "Accept-Encoding": "identity",
                **_authorization(endpoint),
            },
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
        assert self._session is not None  # noqa: S101 - it was entered
        library, began = self._library, time.monotonic()
        headers = request.headers
        if self._keys:
            signed = sign(request.message_id, int(time.time()), request.body, self._keys)
            headers = {**headers, **signed}
        body = request.body
        data = body if len(body) <= LARGE else io.BytesIO(body)
        try:
            async with self._session.post(
                self.endpoint.url, data=data, headers=headers, allow_redirects=False
            ) as response:
                answer = await self._read(response)
                meaning, said = self._understand(response.status, answer)
                return Answer(
                    meaning=meaning,
                    seconds=time.monotonic() - began,
                    status=response.status,
                    error=self._shown(said),
                    retry_after=retry_after(response.headers),
                    reply=self._reply(answer, response.headers)
                    if meaning is Meaning.DONE
                    else None,
                )
        except library.ConnectionTimeoutError:
            error = f"cannot connect within {self.endpoint.connect_seconds:g} s"
        except TimeoutError:
            error = f"no answer within {self.endpoint.timeout_seconds:g} s"
        except library.ClientConnectorCertificateError as problem:
            error = f"its certificate is refused: {problem.certificate_error}"
        except library.ClientConnectorError as problem:
            error = f"cannot connect: {problem.os_error.strerror or problem.os_error}"
        except library.ClientResponseError as problem:
            # its text has the URL
            error = f"no answer in HTTP: {problem.message}"
        except (library.ClientError, ssl.SSLError, OSError, ValueError, EOFError) as problem:
            error = f"no answer: {type(problem).__name__}: {problem}"
        seconds = time.monotonic() - began
        return Answer(meaning=Meaning.WAITS, seconds=seconds, error=self._shown(error))

    def _shown(self, text: str) -> str:
        """A text on one line, and without what nobody may see: an endpoint may repeat it."""
        for secret, shown in self._hidden:
            text = text.replace(secret, shown)
        return " ".join(kept(text).split())

    def _understand(self, status: int, body: bytes) -> tuple[Meaning, str]:
        """What an answer means, and what is wrong with it."""
        meaning = meaning_of(status, rejects=self.endpoint.client_errors == "reject")
        if meaning is not Meaning.DONE:
            return meaning, said_by(status, body)
        problem = xmlrpc.fault(body) if self.endpoint.mode == "xmlrpc" else None
        if self.endpoint.reply and len(body) > replies.MOST:
            problem = f"its answer is no reply: it has more than {replies.MOST:,} bytes"
        return (meaning, "") if problem is None else (Meaning.FAILED, problem)

    def _reply(self, body: bytes, headers: Mapping[str, str]) -> Reply | None:
        """What is to be sent back; None if the answer has no body, or nobody wants one."""
        if not self.endpoint.reply or not body:
            return None
        content_type = headers.get("Content-Type")
        if self.endpoint.mode == "xmlrpc":
            body, content_type = xmlrpc.result(body), "application/json"
        said = unquote(headers.get("ce-type", ""))
        return Reply(
            body=body,
            content_type=content_type,
            message_type=said or self.endpoint.reply_type,
        )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the answer to its end, so that the connection can be kept; of a long one, a part."""
        body = bytearray()
        most = replies.MOST + 1 if self.endpoint.reply else MOST
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


def _tls(endpoint: Endpoint) -> ssl.SSLContext | bool:
    """How the endpoint's certificate is verified; True: as this system does it.

    Raises:
        ConfigurationError: a file cannot be read, or holds something else.
    """
    if endpoint.ca_file is None and endpoint.client_certificate is None:
        return True
    try:
        context = ssl.create_default_context(cafile=endpoint.ca_file)
        if endpoint.client_certificate is not None:
            context.load_cert_chain(endpoint.client_certificate, endpoint.client_key)
    except (OSError, ssl.SSLError) as error:
        files = (endpoint.ca_file, endpoint.client_certificate, endpoint.client_key)
        named = ", ".join(str(one) for one in files if one)
        raise ConfigurationError(f"cannot use {named}: {error.strerror or error}") from None
    return context


def _hidden(endpoint: Endpoint) -> list[tuple[str, str]]:
    """What nobody may see, and what is shown in its place."""
    secrets = [*endpoint.secrets, endpoint.bearer, endpoint.password]
    hidden = [(endpoint.url, endpoint.shown)] if endpoint.url != endpoint.shown else []
    hidden += [(one.get_secret_value(), HIDDEN) for one in secrets if one is not None]
    said = _authorization(endpoint).get("Authorization", "").partition(" ")[2]
    query = urlsplit(endpoint.url).query
    hidden += [(one, HIDDEN) for one in (said, query) if one]
    return [(one, shown) for one, shown in hidden if len(one) >= SHORTEST]


def _authorization(endpoint: Endpoint) -> dict[str, str]:
    if endpoint.bearer is not None:
        return {"Authorization": f"Bearer {endpoint.bearer.get_secret_value()}"}
    if endpoint.user is not None and endpoint.password is not None:
        both = f"{endpoint.user}:{endpoint.password.get_secret_value()}".encode()
        return {"Authorization": f"Basic {base64.b64encode(both).decode()}"}
    return {}
