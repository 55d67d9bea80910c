"""XML-RPC: a message calls a method of a server, and a fault is a failure with its text.

The body is JSON: a list has the parameters, anything else is the only parameter. Python's own
library writes the call and reads the answer; its parser refuses entities that grow without bound
(Expat from 2.4 on), and how much of an answer is read has a bound.
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
    """One method."""

    method: str

    def request(self, message: Received) -> Request:
        """The call that a message stands for.

        Raises:
            UnreadableBody: it is not JSON, or holds what XML-RPC does not know, as large numbers.
        """
        said = message.json()
        parameters: tuple[Any, ...] = tuple(said) if isinstance(said, list) else (said,)
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
        """What is wrong, by the answer to a call.

        >>> one = XmlRpc("order")
        >>> one.fault(200, xmlrpc.client.dumps((True,), methodresponse=True).encode())
        >>> one.fault(200, xmlrpc.client.dumps(xmlrpc.client.Fault(7, "no order")).encode())
        'fault 7: no order'
        >>> one.fault(200, b"<html>welcome</html>"), one.fault(503, b"down")
        ('the answer is no XML-RPC', None)
        """
        if status // 100 != 2:  # noqa: PLR2004 - as HTTP counts
            return None
        try:
            xmlrpc.client.loads(body)
        except xmlrpc.client.Fault as problem:
            return f"fault {problem.faultCode}: {problem.faultString}"
        except Exception:  # whatever an answer makes the parser raise
            return UNKNOWN
        return None if b"methodResponse" in body else UNKNOWN

    def result(self, body: bytes) -> bytes:
        """What a call has returned, as JSON; what JSON does not know is a text.

        >>> answer = xmlrpc.client.dumps(({"number": 7},), methodresponse=True)
        >>> XmlRpc("order").result(answer.encode())
        b'{"number": 7}'
        """
        returned, _ = xmlrpc.client.loads(body)
        return json.dumps(returned[0] if returned else None, default=str).encode()
