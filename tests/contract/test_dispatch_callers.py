"""Who calls an endpoint, and by which way: tokens of OAuth 2, and proxies."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from pydantic import SecretStr

from saf.receiving.dispatch.credentials import NoToken, parsed
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.replies import Answer, Meaning
from saf.receiving.dispatch.settings import Endpoint
from tests.endpoints import Got, Partner, Reply, listening, serving


@pytest.fixture
def partner() -> Iterator[Partner]:
    with serving(Partner()) as one:
        yield one


@pytest.fixture
def login() -> Iterator[Partner]:
    """Gives tokens, each another one."""
    with serving(Partner()) as one:
        given = 0

        async def answer(_: Got) -> Reply:
            nonlocal given
            given += 1
            said = {"access_token": f"token-{given}", "token_type": "Bearer", "expires_in": 60}
            return 200, {"content-type": "application/json"}, json.dumps(said).encode()

        one.answer = answer
        yield one


def post(endpoint: Endpoint, times: int = 1) -> list[Answer]:
    """Some requests, all at once."""

    async def work() -> list[Answer]:
        async with Client(endpoint) as client:
            some = [Request(message_id=str(n), headers={}, body=b"{}") for n in range(times)]
            return await asyncio.gather(*map(client.post, some))

    return asyncio.run(work())


def oauth(partner: Partner, login: Partner, **more: Any) -> Endpoint:
    return Endpoint(
        url=partner.url,
        **{"token_url": login.url, "client_id": "shöp", "client_secret": "verysecret"} | more,
    )


def test_one_token_serves_many_requests(partner: Partner, login: Partner) -> None:
    answers = post(oauth(partner, login, scope="hooks billing"), times=5)
    assert {answer.meaning for answer in answers} == {Meaning.DONE}
    assert {got.headers["authorization"] for got in partner.accepted} == {"Bearer token-1"}
    (asked,) = login.accepted
    assert parse_qs(asked.body.decode()) == {
        "grant_type": ["client_credentials"],
        "scope": ["hooks billing"],
    }
    said = asked.headers["authorization"].removeprefix("Basic ")
    assert base64.b64decode(said).decode() == "shöp:verysecret"


def test_a_token_that_is_refused_is_asked_for_again_once(partner: Partner, login: Partner) -> None:
    async def answer(got: Got) -> Reply:
        good = got.headers["authorization"] == "Bearer token-2"
        return (
            (204, {}, b"") if good else (401, {}, b"not " + got.headers["authorization"].encode())
        )

    partner.answer = answer
    (done,) = post(oauth(partner, login))
    assert done.meaning is Meaning.DONE

    async def refuse(got: Got) -> Reply:
        return 401, {}, b"not " + got.headers["authorization"].encode()

    partner.answer = refuse
    partner.begun.clear()
    (refused,) = post(oauth(partner, login))
    assert (refused.meaning, refused.status) == (Meaning.REJECTED, 401)
    assert len(partner.begun) == 2
    assert "token-" not in refused.error


def test_while_there_is_no_token_messages_wait(partner: Partner, login: Partner) -> None:
    token = b'{"access_token": "verysecret"}'
    no_token = "the answer has no access_token"
    for status, text, why in (
        (503, b"down", "HTTP 503"),
        (400, token, "HTTP 400"),
        (200, b"verysecret", no_token),
        (200, b'{"access_token": "very\\nsecret"}', "the answer's access_token is invalid"),
    ):
        login.always(status, text)
        (answer,) = post(oauth(partner, login))
        assert (answer.meaning, answer.status) == (Meaning.WAITS, None)
        assert answer.error == f"no token: {why}"
    assert partner.begun == []


def test_a_request_without_a_token_that_is_refused_is_sent_once(partner: Partner) -> None:
    partner.always(401)
    (answer,) = post(Endpoint(url=partner.url, bearer=SecretStr("a token")))
    assert (answer.meaning, answer.status) == (Meaning.REJECTED, 401)
    assert len(partner.begun) == 1


@pytest.mark.parametrize("token", ["", "tökén", "two\r\nlines", 7, None])
def test_a_token_that_no_header_can_have_is_none(token: object) -> None:
    with pytest.raises(NoToken, match="invalid"):
        parsed(json.dumps({"access_token": token}).encode())


def test_a_proxy_of_the_environment_is_not_used(
    partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (answer,) = post(Endpoint(url=partner.url))
    assert answer.meaning is Meaning.DONE


def test_a_proxy_gets_the_request_for_the_endpoint(partner: Partner) -> None:
    endpoint = Endpoint(
        url="http://billing.invalid/hook",
        proxy=partner.url,
        proxy_user="saf",
        proxy_password=SecretStr("verysecret"),
        bearer=SecretStr("a token"),
    )
    (answer,) = post(endpoint)
    assert answer.meaning is Meaning.DONE
    (got,) = partner.accepted
    assert got.headers["host"] == "billing.invalid"
    said = got.headers["proxy-authorization"].removeprefix("Basic ")
    assert base64.b64decode(said) == b"saf:verysecret"
    assert got.headers["authorization"] == "Bearer a token"


def test_a_proxy_does_not_learn_what_an_endpoint_is_told_by_tls() -> None:
    heard: list[bytes] = []

    def refuse(connection: socket.socket) -> None:
        heard.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

    with listening(refuse) as proxy:
        (answer,) = post(
            Endpoint(url="https://billing.invalid", proxy=proxy, bearer=SecretStr("verysecret"))
        )
    assert answer.meaning is Meaning.WAITS
    assert heard[0].startswith(b"CONNECT billing.invalid:443")
    assert b"verysecret" not in heard[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"token_url": "https://x.example.com"}, "belong together"),
        ({"scope": "hooks"}, "belong together"),
        ({"proxy": "http://x.example.com", "public_only": True}, "the proxy decides"),
        ({"proxy_user": "saf"}, "belong together"),
        ({"batch_of": "key"}, 'without mode = "batch"'),
        ({"mode": "batch", "reply": True}, "several messages"),
        ({"template": "{{nothing}}"}, "is not one of"),
        ({"reply_type": "x"}, "without reply = true"),
    ],
)
def test_what_does_not_go_together_is_refused_when_settings_are_read(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Endpoint(url="https://billing.example.com", **given)


def test_a_name_may_have_one_character() -> None:
    names: dict[str, Any] = {"operation": "f", "source": "s", "reply_type": "r"}
    wsdl = Path("orders.wsdl")
    Endpoint(url="https://billing.example.com", mode="soap", wsdl=wsdl, reply=True, **names)
