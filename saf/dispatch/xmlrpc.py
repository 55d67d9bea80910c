"""XML-RPC: a message calls a method of a server, and a fault is a failure with its text.

The body is JSON: a list has the parameters, anything else is the only parameter. Python's own
library writes the call and reads the answer. What a call returns is a reply in JSON, where one is
wanted.
"""

from __future__ import annotations

import json
import xmlrpc.client
from typing import Any
from xml.parsers.expat import ExpatError

from saf.dispatch.envelope import Request
from saf.errors import UnreadableBody
from saf.received import Received

UNKNOWN = "the answer is no XML-RPC"


def request(message: Received, method: str) -> Request:
    """The call that a message stands for.

    Raises:
        UnreadableBody: it is not JSON, or holds what XML-RPC does not know, such as large numbers.
    """
    said = message.json()
    parameters: tuple[Any, ...] = tuple(said) if isinstance(said, list) else (said,)
    try:
        body = xmlrpc.client.dumps(parameters, method, encoding="utf-8", allow_none=True)
    except (TypeError, OverflowError, RecursionError) as error:
        raise UnreadableBody(message.message_id, "XML-RPC", str(error)) from None
    number = str(message.message_id)
    return Request(
        message_id=number,
        headers={"Content-Type": "text/xml", "Idempotency-Key": number},
        body=body.encode("utf-8", errors="xmlcharrefreplace"),
    )


def fault(answer: bytes) -> str | None:
    """What is wrong, by the answer to a call; None if nothing is.

    >>> fault(xmlrpc.client.dumps((True,), methodresponse=True).encode())
    >>> fault(xmlrpc.client.dumps(xmlrpc.client.Fault(7, "no such order")).encode())
    'fault 7: no such order'
    >>> fault(b"<html>welcome</html>")
    'the answer is no XML-RPC'
    """
    try:
        xmlrpc.client.loads(answer)
    except xmlrpc.client.Fault as problem:
        return f"fault {problem.faultCode}: {problem.faultString}"
    except (xmlrpc.client.Error, ExpatError, ValueError, TypeError, LookupError, AttributeError):
        return UNKNOWN
    return None if b"methodResponse" in answer else UNKNOWN


def result(answer: bytes) -> bytes:
    """What a call has returned, as JSON; what JSON does not know is a text.

    >>> result(xmlrpc.client.dumps(({"number": 7},), methodresponse=True).encode())
    b'{"number": 7}'
    """
    (returned,), _ = xmlrpc.client.loads(answer)
    return json.dumps(returned, default=str).encode()
