"""Calls: requests in an endpoint's own protocol, SOAP or XML-RPC, one for each message.

The body of a message is JSON. A list has the parameters in order; any other value is the only
parameter. SOAP also takes an object, which has the parameters by name. A body that cannot become
a call raises `UnreadableBody`.

A fault in an answer is a failure of the message, with the fault's text. A 2xx answer in another
form counts as a fault, too. By SOAP, the answer may be empty with a status in `EMPTY`, and may have
any form if the operation returns nothing.

*SOAP.* A message calls an operation described by a WSDL. zeep makes the envelope and reads the
answer. The request is sent like all others, to the endpoint's URL, whatever address the WSDL
contains. The WSDL and its imports are files: nothing is loaded from the network.

*XML-RPC.* A message calls a method of a server. Python's own library writes the call and reads the
answer. Its parser refuses entities that grow without bound (Expat from 2.4 on), and an answer is
read only up to a bound.
"""

from __future__ import annotations

import json
import xmlrpc.client  # nosec B411
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from urllib.parse import urlsplit

from saf.errors import ConfigurationError, MissingExtra, UnreadableBody
from saf.received import Received
from saf.receiving.dispatch.envelope import Request

NOT_SOAP = "the answer is not SOAP"
NOT_XMLRPC = "the answer is not XML-RPC"

EMPTY = (201, 202, 204)
"""Statuses whose answer may be empty, whatever the operation returns."""


class Call(Protocol):
    """Conversion of messages into calls, and of answers into results."""

    def request(self, message: Received) -> Request:
        """Return the call for a message.

        Raises:
            UnreadableBody: the body is not a call.
        """
        ...

    def fault(self, status: int, body: bytes) -> str | None:
        """Return the fault in an answer; None if it shows none, or the HTTP status shows it."""
        ...

    def result(self, body: bytes) -> bytes:
        """Return the result of a call, as JSON."""
        ...


class Soap(Call):
    """An operation of a service.

    Raises:
        MissingExtra: zeep is not installed.
        ConfigurationError: the WSDL cannot be read, or lacks the operation.
    """

    def __init__(self, wsdl: Path, operation: str) -> None:
        try:
            import zeep
            import zeep.helpers
            from lxml import etree
        except ImportError:
            raise MissingExtra("soap", "calling by SOAP") from None

        library: Any = zeep

        class OnlyFiles(library.Transport):  # type: ignore[misc]
            def load(self, url: str) -> Any:
                if urlsplit(url).scheme in ("http", "https", "file"):
                    raise ConfigurationError(f"{wsdl} imports {url}: store that file beside it")
                return super().load(url)

            def post_xml(self, _: str, envelope: Any, headers: Any) -> Any:
                return envelope, headers

        self._xml = etree
        self._faults = library.exceptions
        self._as_json = library.helpers.serialize_object
        try:
            # a call returns what `post_xml` returns, and is sent by the endpoint's own client
            raw = library.Settings(raw_response=True)
            self._client = library.Client(str(wsdl), transport=OnlyFiles(), settings=raw)
            service = self._client.service
            port = next(iter(next(iter(self._client.wsdl.services.values())).ports.values()))
            self._binding = port.binding
            self._operation = self._binding.get(operation)
            self._call = service[operation]
        except ConfigurationError:
            raise
        except Exception as error:  # zeep may raise anything for a file
            reason = f"{type(error).__name__}: {error}"
            raise ConfigurationError(f"cannot read {wsdl} as a WSDL: {reason}") from None

    def request(self, message: Received) -> Request:
        """Return the call for a message.

        Raises:
            UnreadableBody: the body is not JSON, or lacks the operation's parameters.
        """
        value = message.json()
        args = value if isinstance(value, list) else [] if isinstance(value, dict) else [value]
        named = value if isinstance(value, dict) else {}
        try:
            envelope, headers = self._call(*args, **named)
        except (self._faults.Error, TypeError, ValueError, LookupError, AttributeError) as error:
            raise UnreadableBody(message.message_id, "SOAP", str(error)) from None
        number = str(message.message_id)
        body: bytes = self._xml.tostring(envelope, xml_declaration=True, encoding="utf-8")
        return Request(
            message_id=number,
            headers={**{str(k): str(v) for k, v in headers.items()}, "Idempotency-Key": number},
            body=body,
        )

    def fault(self, status: int, body: bytes) -> str | None:
        """Return the fault in an answer to a call, if any."""
        accepted = status // 100 == 2  # noqa: PLR2004 - as HTTP counts
        if not body and (status in EMPTY or (accepted and self._returns_nothing)):
            return None
        try:
            self._returned(status, body)
        except self._faults.Fault as problem:
            return f"fault {problem.code}: {problem.message}"
        except Exception:  # zeep may raise anything for an answer
            return NOT_SOAP if accepted and not self._returns_nothing else None
        return None

    def result(self, body: bytes) -> bytes:
        """Return the result of the call, as JSON."""
        if self._returns_nothing:
            return b"null"
        returned = self._as_json(self._returned(200, body), dict)
        return json.dumps(returned, default=str).encode()

    @property
    def _returns_nothing(self) -> bool:
        """True if the operation has no output, so that an answer only confirms the call."""
        return self._operation.output is None

    def _returned(self, status: int, body: bytes) -> Any:
        answer = SimpleNamespace(
            status_code=200 if status // 100 == 2 else status,  # noqa: PLR2004 - as HTTP counts
            content=body,
            headers={"Content-Type": "text/xml"},
            encoding="utf-8",
        )
        return self._binding.process_reply(self._client, self._operation, answer)


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
            return NOT_XMLRPC
        return None if b"methodResponse" in body else NOT_XMLRPC

    def result(self, body: bytes) -> bytes:
        """Return the result of a call, as JSON; values unknown to JSON become text.

        >>> answer = xmlrpc.client.dumps(({"number": 7},), methodresponse=True)
        >>> XmlRpc("order").result(answer.encode())
        b'{"number": 7}'
        """
        returned, _ = xmlrpc.client.loads(body)
        return json.dumps(returned[0] if returned else None, default=str).encode()
