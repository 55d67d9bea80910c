"""Endpoints that are slow, broken or hostile: each request ends in time, and says what happened."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr
from standardwebhooks.webhooks import Webhook

import saf.webhooks
from saf.errors import ConfigurationError, NotVerified
from saf.receiving.dispatch.credentials import hidden
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.http import Client, redirected
from saf.receiving.dispatch.replies import Answer, Meaning
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.failures import HIDDEN, SHORTEST
from saf.webhooks import verify
from tests.endpoints import Got, Partner, Reply, listening, serving
from tests.needed import needed

SECRET, OLD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_" + "b2xk" * 8
REQUEST = Request(message_id="one", headers={"Idempotency-Key": "one"}, body=b'{"total": 7}')


def post(endpoint: Endpoint, request: Request = REQUEST) -> Answer:
    async def once() -> Answer:
        async with Client(endpoint) as client:
            return await client.post(request)

    return asyncio.run(once())


def hang(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def drip(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b"x")
        time.sleep(0.1)


def drip_headers(connection: socket.socket) -> None:
    connection.recv(65536)
    for one in b"HTTP/1.1 200 OK\r\nX: " + 1000 * b"x":
        connection.sendall(bytes([one]))
        time.sleep(0.1)


def reset(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def talk_nonsense(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"220 mail.example.com ESMTP\r\n")


def send_many_headers(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for number in range(1_000_000):
        connection.sendall(b"X-%d: %s\r\n" % (number, 1000 * b"x"))


@pytest.mark.parametrize("serve", [hang, drip, drip_headers])
def test_a_request_ends_when_its_time_is_over_whatever_the_endpoint_does(
    serve: Callable[[socket.socket], None],
) -> None:
    with listening(serve) as url:
        began = time.monotonic()
        answer = post(Endpoint(url=url, timeout_seconds=1))
        assert time.monotonic() - began < 5
    assert (answer.meaning, answer.status) == (Meaning.WAITS, None)
    assert answer.error == "no answer within 1 s"


@pytest.mark.parametrize(
    ("serve", "says"),
    [(reset, "no answer: "), (talk_nonsense, "no answer in HTTP: ")],
)
def test_what_is_no_answer_is_said_in_one_line(
    serve: Callable[[socket.socket], None], says: str
) -> None:
    with listening(serve) as url:
        answer = post(Endpoint(url=f"{url}?token=verysecret"))
    assert (answer.meaning, answer.status) == (Meaning.WAITS, None)
    assert answer.error.startswith(says)
    assert "\n" not in answer.error
    assert "verysecret" not in answer.error


def test_a_connection_that_is_refused_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    answer = post(Endpoint(url=f"http://127.0.0.1:{port}"))
    assert answer.error.startswith("cannot connect: ")


def test_an_answer_of_a_gigabyte_takes_no_memory_and_counts_by_its_status() -> None:
    sent = 0

    def send_much(connection: socket.socket) -> None:
        nonlocal sent
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
        for _ in range(1024):
            connection.sendall(bytes(1 << 20))
            sent += 1

    with listening(send_much) as url:
        before = psutil.Process().memory_info().rss
        began = time.monotonic()
        answer = post(Endpoint(url=url))
        assert time.monotonic() - began < 10
        assert psutil.Process().memory_info().rss - before < 64 << 20
    assert (answer.meaning, answer.status) == (Meaning.DONE, 200)
    # what the sockets hold, and a little more
    assert sent < 32


@pytest.mark.parametrize("value", ["<bigdecimal>x</bigdecimal>", "<int>x</int>"])
def test_an_answer_to_a_call_that_cannot_be_read_is_a_failure(value: str) -> None:
    answer = f"<methodResponse><params><param><value>{value}</value></param></params>"
    with serving(Partner()) as partner:
        partner.always(200, f"{answer}</methodResponse>".encode())
        said = post(Endpoint(url=partner.url, mode="xmlrpc", method="order", reply=True))
    assert (said.meaning, said.error) == (Meaning.FAILED, "the answer is not XML-RPC")


@pytest.mark.parametrize("host", ["a..b", f"{64 * 'a'}.example.com"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(ValueError, match="it is not a URL"):
            Endpoint(url=f"{scheme}://{host}/hook")


@pytest.mark.parametrize("url", ["https:///hook", "https://billing.example.com:0/hook"])
def test_a_url_without_a_host_or_a_port_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="it is not a URL"):
        Endpoint(url=url)


def test_a_redirect_by_tls_to_another_host_is_not_followed() -> None:
    for url in ("http://a.example.com/hook", "https://a.example.com/hook"):
        assert redirected(url, 307, {"Location": "https://b.example.com/hook"}) is None


def test_headers_without_end_are_no_answer() -> None:
    with listening(send_many_headers) as url:
        before = psutil.Process().memory_info().rss
        answer = post(Endpoint(url=url, timeout_seconds=3))
        assert psutil.Process().memory_info().rss - before < 64 << 20
    assert answer.meaning is Meaning.WAITS


def test_a_redirect_is_not_followed() -> None:
    with serving(Partner()) as inside, serving(Partner()) as outside:
        outside.always(307, location=inside.url)
        answer = post(Endpoint(url=outside.url))
        assert (answer.meaning, answer.status) == (Meaning.WAITS, 307)

        async def here(_: Got) -> Reply:
            return (307, {"location": "/hook"}, b"") if len(outside.begun) < 9 else (204, {}, b"")

        outside.answer = here
        assert post(Endpoint(url=outside.url)).status == 307
        assert len(outside.begun) == 2
    assert inside.begun == []


def test_an_answer_has_the_seconds_that_it_took() -> None:
    with serving(Partner()) as partner:
        partner.after(0.2)
        began = time.monotonic()
        answer = post(Endpoint(url=partner.url))
        assert 0.2 <= answer.seconds <= time.monotonic() - began


def test_the_least_that_an_endpoint_may_be_given() -> None:
    short = Endpoint(url="https://billing.example.com", timeout_seconds=0.01, connect_seconds=0.01)
    assert (short.timeout_seconds, short.attempts) == (0.01, 10)
    called = Endpoint(url=short.url, mode="soap", wsdl=Path("billing.wsdl"), operation="f")
    assert called.operation == "f"


def test_a_redirect_is_followed_to_the_same_host_only_where_one_says_so() -> None:
    with serving(Partner()) as inside, serving(Partner()) as outside:

        async def answer(_: Got) -> Reply:
            moved = len(outside.begun) > 1
            return (204, {}, b"") if moved else (308, {"location": "/v2?key=verysecret"}, b"")

        outside.answer = answer
        followed = post(Endpoint(url=outside.url, follow_redirects=True))
        assert (followed.meaning, followed.status) == (Meaning.DONE, 204)
        assert [got.body for got in outside.begun] == [REQUEST.body] * 2
        outside.always(307, location=inside.url)
        elsewhere = post(Endpoint(url=outside.url, follow_redirects=True))
        assert (elsewhere.meaning, elsewhere.status) == (Meaning.WAITS, 307)
        outside.begun.clear()
        outside.always(307, location="/hook")
        assert post(Endpoint(url=outside.url, follow_redirects=True)).status == 307
        assert len(outside.begun) == 4
    assert inside.begun == []


def test_an_answer_that_repeats_a_secret_is_kept_without_it() -> None:
    with serving(Partner()) as partner:
        partner.always(400, b"bad header Bearer verysecret for\r\n ?key=othersecret")
        endpoint = Endpoint.model_validate(
            {"url": f"{partner.url}?key=othersecret", "bearer": "verysecret"}
        )
        answer = post(endpoint)
        assert partner.begun[0].headers["authorization"] == "Bearer verysecret"
    assert answer.error == "HTTP 400: bad header Bearer *** for ?***"
    assert "verysecret" not in repr(endpoint)
    assert "othersecret" not in repr(endpoint)


def test_a_secret_that_contains_another_one_is_hidden_whole() -> None:
    with serving(Partner()) as partner:
        partner.always(400, b"neither short-secret-and-more nor short-secret nor 4444 nor 333")
        endpoint = Endpoint.model_validate(
            {
                "url": f"{partner.url}?a=4444&b=333",
                "user": "saf",
                "password": "short-secret",
                "proxy": partner.url,
                "proxy_user": "saf",
                "proxy_password": "short-secret-and-more",
            }
        )
        answer = post(endpoint)
    assert answer.error == "HTTP 400: neither *** nor *** nor *** nor 333"


def test_a_secret_is_hidden_from_its_shortest_length_on() -> None:
    endpoint = Endpoint(url="https://billing.example.com", bearer=SecretStr("s" * SHORTEST))
    assert ("s" * SHORTEST, HIDDEN) in hidden(endpoint)


@pytest.mark.parametrize("before", [0, 180, 190, 195, 199])
def test_a_secret_across_the_end_of_what_is_kept_is_not_kept_in_part(before: int) -> None:
    with serving(Partner()) as partner:
        partner.always(400, b"x" * before + b"verysecret" + b"y" * 100)
        answer = post(Endpoint.model_validate({"url": partner.url, "bearer": "verysecret"}))
    assert answer.error == f"HTTP 400: {('x' * before + '***' + 'y' * 100)[:200]}"


def test_an_answer_that_repeats_one_value_of_the_query_is_kept_without_it() -> None:
    with serving(Partner()) as partner:
        partner.always(400, b"no key other/secret or other%2Fsecret on page 2")
        answer = post(Endpoint(url=f"{partner.url}?key=other%2Fsecret&page=2"))
    assert answer.error == "HTTP 400: no key *** or *** on page 2"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"])
def test_the_guard_refuses_an_address_inside_however_it_is_written(host: str) -> None:
    with serving(Partner()) as partner:
        url = partner.url.replace("127.0.0.1", host)
        answer = post(Endpoint(url=url, public_only=True))
        assert answer.meaning is Meaning.WAITS
        assert partner.begun == []
    assert answer.error.startswith(("cannot connect: ", "no answer: "))


def test_the_guard_looks_at_the_address_that_is_connected_to_and_not_at_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(Partner()) as partner:
        port = int(partner.url.split(":")[2].split("/")[0])
        asked = 0

        def changing(*_: object, **__: object) -> list[Any]:
            nonlocal asked
            asked += 1
            address = "192.0.2.1" if asked == 1 else "127.0.0.1"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        monkeypatch.setattr(socket, "getaddrinfo", changing)
        url = f"http://changing.example.com:{port}/hook"
        for _ in range(3):
            answer = post(Endpoint(url=url, public_only=True, connect_seconds=0.5))
            assert answer.meaning is Meaning.WAITS
        assert asked > 1
        assert partner.begun == []
        assert post(Endpoint(url=url)).meaning is Meaning.DONE


def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    needed("openssl", "openssl")
    assert shutil.which("openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "1"),
            *("-subj", "/CN=other.example.com", "-addext", "subjectAltName=DNS:other.example.com"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.recv(65536)
            wrapped.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with listening(serve) as url:
        secure = url.replace("http:", "https:")
        for endpoint in (Endpoint(url=secure), Endpoint(url=secure, ca_file=certificate)):
            answer = post(endpoint)
            assert answer.meaning is Meaning.WAITS
            assert answer.error.startswith("its certificate is refused: ")
        with pytest.raises(ConfigurationError, match=r"cannot use .*nothing.pem: No such file"):
            post(Endpoint(url=secure, ca_file=tmp_path / "nothing.pem"))


def test_the_reference_implementation_of_standard_webhooks_verifies_what_is_signed() -> None:
    with serving(Partner()) as partner:
        endpoint = Endpoint.model_validate({"url": partner.url, "secrets": [SECRET, OLD_SECRET]})
        post(endpoint)
    (got,) = partner.accepted
    for secret in (SECRET, OLD_SECRET):
        assert Webhook(secret).verify(got.body, got.headers) == {"total": 7}
        assert verify(got.headers, got.body, secret) == "one"
    assert saf.webhooks.verify(got.headers, got.body, [OLD_SECRET]) == "one"
    changed = {**got.headers, "webhook-id": "two"}
    late = int(got.headers["webhook-timestamp"]) + 301
    for headers, body, now, why in (
        (got.headers, b"{}", None, "no signature in it is right"),
        (changed, got.body, None, "no signature in it is right"),
        (got.headers, got.body, late, "301 s ago"),
        ({}, got.body, None, "missing header webhook-id"),
        ({**got.headers, "webhook-signature": "v1,ü v2,x x"}, got.body, None, "no signature"),
    ):
        with pytest.raises(NotVerified, match=why):
            verify(headers, body, SECRET, now=now)


def test_a_secret_that_is_none_is_refused_without_being_said() -> None:
    with pytest.raises(ValueError, match="the base64 of 24 to 64 bytes") as caught:
        Endpoint.model_validate({"url": "http://example.com", "secrets": ["whsec_short"]})
    assert "whsec_short" not in str(caught.value)
