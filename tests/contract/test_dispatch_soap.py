"""SOAP: messages call an operation that a WSDL describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as Xml
from xml.sax.saxutils import escape

import pytest

from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.settings import Endpoint
from tests.endpoints import Got, Partner, Reply, dispatch, serving
from tests.pipeline import connect
from tests.receivers import dead, prepare, put, waiting
from tests.soap import NS, WSDL, envelope


def fault(text: str) -> bytes:
    return envelope(
        f"<e:Fault><faultcode>e:Client</faultcode><faultstring>{text}</faultstring></e:Fault>"
    )


async def warehouse(got: Got) -> Reply:
    """The service: it knows what its WSDL says."""
    assert got.headers["soapaction"] == f'"{NS}BookOrder"'
    asked = Xml.fromstring(got.body).find(f".//{{{NS}}}BookOrder")  # noqa: S314 - our own
    assert asked is not None
    order, total = (asked.findtext(f"{{{NS}}}{name}") or "" for name in ("order", "total"))
    if order == "none":
        return 500, {"content-type": "text/xml"}, fault("no such order")
    told = f"<number>{int(total) * 2}</number><note>{escape(order)}</note>"
    return (
        200,
        {"content-type": "text/xml"},
        envelope(f'<BookOrderResponse xmlns="{NS}">{told}</BookOrderResponse>'),
    )


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    return mom


@pytest.fixture
def partner() -> Iterator[Partner]:
    with serving(Partner()) as one:
        one.answer = warehouse
        yield one


@pytest.fixture
def wsdl(tmp_path: Path) -> Path:
    file = tmp_path / "warehouse.wsdl"
    file.write_text(WSDL)
    return file


def test_soap_calls_an_operation_and_what_it_returns_is_a_reply(
    inbox: Dsn, partner: Partner, wsdl: Path
) -> None:
    put(inbox, '{"order": "A <1>", "total": 7}', key="a", from_service="shop")
    more = {"mode": "soap", "wsdl": wsdl, "operation": "BookOrder", "reply": True}
    done = dispatch(inbox, partner, **more)
    assert done.summary.handled == 1
    with connect(inbox) as connection:
        ((body,),) = fetch(connection, "SELECT body FROM saf.outbox")
    assert json.loads(body) == {"number": 14, "note": "A <1>"}


def test_a_fault_is_a_failure_with_its_text_and_a_body_that_fits_nothing_is_rejected(
    inbox: Dsn, partner: Partner, wsdl: Path
) -> None:
    put(inbox, '{"order": "none", "total": 7}', key="a")
    put(inbox, '{"colour": "red"}', key="b")
    put(inbox, '["B-2", 1]', key="c")
    more = {"mode": "soap", "wsdl": wsdl, "operation": "BookOrder"}
    done = dispatch(inbox, partner, **more)
    assert done.summary.handled == 1
    assert waiting(inbox) == ["a"]
    assert dead(inbox) == [('{"colour": "red"}', "rejected")]
    with connect(inbox) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.backoff")
    assert error == "fault e:Client: no such order"


def test_a_page_is_no_answer_to_a_call(inbox: Dsn, partner: Partner, wsdl: Path) -> None:
    partner.always(200, b"<html>welcome</html>")
    put(inbox, '["B-2", 1]', key="c")
    dispatch(inbox, partner, mode="soap", wsdl=wsdl, operation="BookOrder")
    assert waiting(inbox) == ["c"]


@pytest.mark.parametrize("status", [201, 202, 204])
def test_an_answer_without_a_body_says_that_the_call_was_taken(
    inbox: Dsn, partner: Partner, wsdl: Path, status: int
) -> None:
    partner.always(status)
    put(inbox, '["B-2", 1]', key="c", from_service="shop")
    more = {"mode": "soap", "wsdl": wsdl, "operation": "BookOrder", "reply": True}
    done = dispatch(inbox, partner, **more)
    assert (done.summary.handled, done.exit_code) == (1, 0)
    with connect(inbox) as connection:
        assert fetch(connection, "SELECT FROM saf.outbox") == []


def test_what_is_returned_with_another_status_of_success_is_a_reply(
    inbox: Dsn, partner: Partner, wsdl: Path
) -> None:
    async def answer(got: Got) -> Reply:
        _, headers, body = await warehouse(got)
        return 202, headers, body

    partner.answer = answer
    put(inbox, '{"order": "A", "total": 7}', key="a", from_service="shop")
    more = {"mode": "soap", "wsdl": wsdl, "operation": "BookOrder", "reply": True}
    assert dispatch(inbox, partner, **more).exit_code == 0
    with connect(inbox) as connection:
        ((body,),) = fetch(connection, "SELECT body FROM saf.outbox")
    assert json.loads(body) == {"number": 14, "note": "A"}


@pytest.mark.parametrize("body", [b"", envelope("")], ids=["no body", "an envelope"])
def test_an_operation_without_output_is_done_by_any_answer_but_a_fault(
    inbox: Dsn, partner: Partner, wsdl: Path, body: bytes
) -> None:
    one_way = WSDL.replace('<output message="t:Told"/>', "")
    wsdl.write_text(one_way.replace('<output><soap:body use="literal"/></output>', ""))
    more = {"mode": "soap", "wsdl": wsdl, "operation": "BookOrder", "reply": True}
    partner.always(200, body)
    put(inbox, '["B-2", 1]', key="c", from_service="shop")
    assert dispatch(inbox, partner, **more).exit_code == 0
    partner.always(500, fault("no such order"))
    put(inbox, '["B-3", 1]', key="d", from_service="shop")
    assert dispatch(inbox, partner, **more).exit_code == 75
    assert waiting(inbox) == ["d"]


def test_an_answer_of_200_without_a_body_is_none_where_something_is_returned(
    inbox: Dsn, partner: Partner, wsdl: Path
) -> None:
    partner.always(200)
    put(inbox, '["B-2", 1]', key="c")
    dispatch(inbox, partner, mode="soap", wsdl=wsdl, operation="BookOrder")
    assert waiting(inbox) == ["c"]


@pytest.mark.parametrize(
    ("change", "operation", "says"),
    [
        (("<definitions", "<nonsense"), "BookOrder", "cannot read"),
        (("", ""), "SellOrder", "SellOrder"),
        (
            ("<types>", '<import namespace="x" location="http://127.0.0.1:1/x.wsdl"/><types>'),
            "BookOrder",
            "store that file beside it",
        ),
    ],
)
def test_a_wsdl_that_is_none_is_named(
    wsdl: Path, change: tuple[str, str], operation: str, says: str
) -> None:
    wsdl.write_text(WSDL.replace(*change, 1))
    with pytest.raises(ConfigurationError, match=says):
        Client(Endpoint(url="http://x.example.com", mode="soap", wsdl=wsdl, operation=operation))
