"""A small schema registry for tests: the part of Confluent's API that clients use, over HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

JSON = "application/vnd.schemaregistry.v1+json"


@dataclass(kw_only=True)
class SchemaRegistry:
    """Its schemas, and the questions that it was asked."""

    login: str = ""
    """``user:password`` that each request needs; empty: none."""
    subjects: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def register(self, subject: str, given: dict[str, Any]) -> int:
        """Add a version, unless it exists; return the schema's id."""
        known = self.subjects.setdefault(subject, [])
        kept = {"schemaType": "AVRO", "references": [], **given}
        for one in known:
            if one["schema"] == kept["schema"]:
                return int(one["id"])
        kept |= {"id": len(self.schemas) + 1, "subject": subject, "version": len(known) + 1}
        self.schemas.append(kept)
        known.append(kept)
        return int(kept["id"])

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        """The answer to a request; None for 404."""
        self.asked.append(f"{method} {path}")
        match method, [unquote(part) for part in path.strip("/").split("/")]:
            case "POST", ["subjects", subject, "versions"]:
                return {"id": self.register(subject, body)}
            case "GET", ["subjects"]:
                return [*self.subjects]
            case "GET", ["subjects", subject, "versions", version]:
                known = self.subjects.get(subject, [])
                wanted = len(known) if version == "latest" else int(version)
                return self.shown(known[wanted - 1], query) if 0 < wanted <= len(known) else None
            case "POST", ["subjects", subject]:
                for one in self.subjects.get(subject, []):
                    if one["schema"] == body["schema"]:
                        return one
            case "GET", ["schemas", "ids", number] if 0 < int(number) <= len(self.schemas):
                return self.shown(self.schemas[int(number) - 1], query)
        return None

    def shown(self, schema: dict[str, Any], query: dict[str, list[str]]) -> dict[str, Any]:
        """A schema as the real one shows it: Protobuf as its language, unless asked otherwise."""
        if schema["schemaType"] == "PROTOBUF" and query.get("format") != ["serialized"]:
            return {**schema, "schema": 'syntax = "proto3";'}
        return schema


@contextmanager
def schema_registry(login: str = "") -> Iterator[SchemaRegistry]:
    """A registry that answers while the block lasts."""
    registry = SchemaRegistry(login=login)
    expected = f"Basic {base64.b64encode(login.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply()

        def do_POST(self) -> None:
            self.reply()

        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if login and self.headers.get("Authorization") != expected:
                self.write(401, {"error_code": 401, "message": "Unauthorized"})
                return
            parts = urlsplit(self.path)
            given = json.loads(body) if body else None
            found = registry.answer(self.command, parts.path, parse_qs(parts.query), given)
            if found is None:
                self.write(404, {"error_code": 40401, "message": f"{parts.path} not found."})
            else:
                self.write(200, found)

        def write(self, status: int, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    registry.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Message = tuple[str, list[tuple[str, Any]]]
"""The name of a Protobuf message, and its fields."""


def proto(*messages: Message, name: str = "order.proto") -> str:
    """A file of Protobuf messages, as a registry hands it out; see `proto_file`."""
    return serialized(proto_file(*messages, name=name))


def serialized(file: FileDescriptorProto) -> str:
    """A file as a registry hands it out."""
    return base64.b64encode(file.SerializeToString()).decode()


def proto_file(*messages: Message, name: str = "order.proto") -> FileDescriptorProto:
    """A file of Protobuf messages with fields.

    A field's kind is a number of `FieldDescriptorProto`, or the name of a message.
    """
    file = FileDescriptorProto(name=name, package="shop", syntax="proto3")
    for of, fields in messages:
        message = file.message_type.add(name=of)
        for number, (called, kind) in enumerate(fields, 1):
            one = message.field.add(name=called, number=number, label=1)
            if isinstance(kind, str):
                one.type, one.type_name = FieldDescriptorProto.TYPE_MESSAGE, kind
                if kind.startswith(".google") and not file.dependency:
                    file.dependency.append("google/protobuf/timestamp.proto")
            else:
                one.type = kind
    return file
