"""XML-RPC: a message calls a method of a server, and a fault is a failure with its text.

The body is JSON: a list has the parameters, any other value is the only parameter. Python's own
library writes the call and reads the answer; its parser refuses entities that grow without bound
(Expat from 2.4 on), and an answer is read only up to a bound.
"""

from __future__ import annotations

import json
import xmlrpc.client  # nosec B411
from dataclasses import dataclass
from typing import Any

from saf.dispatch.calls import Call
from saf.dispatch.envelope import Request
from saf.errors import UnreadableBody
from saf.received import Received

UNKNOWN = "the answer is not XML-RPC"


@dataclass(frozen=True)
class XmlRpc(Call):
    """A method of a server."""

    method: str

    def request(self, message: Received) -> Request:
        """Return the call for a message.

        Raises:
            UnreadableBody: the body is not JSON, or has values unknown to XML-RPC, e.g. large
                numbers.
        """
        document = message.json()
        parameters: tuple[Any, ...] = tuple(document) if isinstance(document, list) else (document,)
        try:
            body = xmlrpc.client.dumps(parameters, self.method, encoding="utf-8", allow_none=True)
        except (TypeError, OverflowError, RecursionError) as error:
            raise UnreadableBody(message.message_id, "XML-RPC", str(error)) from None
        number = str(message.message_id)
        return Request(
            message_id=number,
            headers={"Content-Type": "text/xml", "Idempotency-Key": number},
            body=body.encode("utf-8", errors="xmlcharrefreplace"),
        )

    def fault(self, status: int, body: bytes) -> str | None:
        """Return the fault in an answer to a call, if any.

        >>> one = XmlRpc("order")
        >>> one.fault(200, xmlrpc.client.dumps((True,), methodresponse=True).encode())
        >>> one.fault(200, xmlrpc.client.dumps(xmlrpc.client.Fault(7, "no order")).encode())
        'fault 7: no order'
        >>> one.fault(200, b"<html>welcome</html>"), one.fault(503, b"down")
        ('the answer is not XML-RPC', None)
        """
        if status // 100 != 2:  # noqa: PLR2004 - as HTTP counts
            return None
        try:
            xmlrpc.client.loads(body)
        except xmlrpc.client.Fault as problem:
            return f"fault {problem.faultCode}: {problem.faultString}"
        except Exception:  # the parser may raise anything for an answer
            return UNKNOWN
        return None if b"methodResponse" in body else UNKNOWN

    def result(self, body: bytes) -> bytes:
        """Return the result of a call, as JSON; values unknown to JSON become text.

        >>> answer = xmlrpc.client.dumps(({"number": 7},), methodresponse=True)
        >>> XmlRpc("order").result(answer.encode())
        b'{"number": 7}'
        """
        returned, _ = xmlrpc.client.loads(body)
        return json.dumps(returned[0] if returned else None, default=str).encode()
