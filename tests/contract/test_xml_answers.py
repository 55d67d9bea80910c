"""Answers in XML that try to bring in files, addresses, or more text than anybody has sent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from saf.receiving.dispatch.calls import NOT_SOAP as NO_SOAP
from saf.receiving.dispatch.calls import NOT_XMLRPC as UNKNOWN
from saf.receiving.dispatch.calls import Call, Soap, XmlRpc
from tests.soap import NS, WSDL, envelope

SECRET = "s3kr1t"
GROWS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))


@pytest.fixture(params=["xmlrpc", "soap"])
def call(request: pytest.FixtureRequest, tmp_path: Path) -> Call:
    if request.param == "xmlrpc":
        return XmlRpc("order")
    file = tmp_path / "warehouse.wsdl"
    file.write_text(WSDL)
    return Soap(file, "BookOrder")


def answer(call: Call, declared: str, text: str) -> bytes:
    """An answer with a document type that declares entities, and a text that uses them."""
    if isinstance(call, XmlRpc):
        said = f"<string>{text}</string>"
        whole = f"<methodResponse><params><param><value>{said}</value></param></params>"
        whole += "</methodResponse>"
    else:
        told = f"<number>7</number><note>{text}</note>"
        whole = envelope(f'<BookOrderResponse xmlns="{NS}">{told}</BookOrderResponse>').decode()
    return f'<?xml version="1.0"?><!DOCTYPE any [{declared}]>{whole}'.encode()


def test_an_answer_without_tricks_is_read(call: Call) -> None:
    body = answer(call, "", "plain")
    assert call.fault(200, body) is None
    assert b"plain" in call.result(body)


@pytest.mark.parametrize("kind", ["SYSTEM", 'PUBLIC "any"'])
def test_no_file_is_brought_in(call: Call, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    body = answer(call, f'<!ENTITY x {kind} "{file.as_uri()}">', "a&x;b")
    if call.fault(200, body) is None:
        assert SECRET.encode() not in call.result(body)


def test_a_text_that_grows_without_bound_is_no_answer(call: Call) -> None:
    body = answer(call, f'<!ENTITY a0 "ha">{GROWS}', "&a9;")
    began = time.process_time()
    assert call.fault(200, body) in (UNKNOWN, NO_SOAP)
    assert time.process_time() - began < 10
