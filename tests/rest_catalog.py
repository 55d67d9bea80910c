"""A REST catalog of Iceberg over a catalog in SQLite: as much of the protocol as saf needs.

What it hears and says are pyiceberg's own models of the protocol. It lets in who has its token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg.catalog.rest import CreateTableRequest, TableResponse
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.sorting import SortOrder

STATUS = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}


@contextmanager
def rest_catalog(folder: Path, token: str) -> Iterator[str]:
    """Give the URL of a catalog whose tables are in a folder, until the block ends."""
    folder.mkdir()
    uri = f"sqlite:///{folder}/catalog.db"
    with closing(SqlCatalog("rest", uri=uri, warehouse=f"file://{folder}")) as catalog:

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._serve("HEAD")

            def do_GET(self) -> None:
                self._serve("GET")

            def do_POST(self) -> None:
                self._serve("POST")

            def log_message(self, *_: Any) -> None:
                """Nothing."""

            def _serve(self, method: str) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    status, said = 200, answer(catalog, method, self.path.split("?")[0], text)
                except tuple(STATUS) as error:
                    status, said = STATUS[type(error)], refusal(type(error).__name__, str(error))
                if self.headers.get("Authorization") != f"Bearer {token}":
                    status, said = 401, refusal("NotAuthorizedException", "not this token")
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                if method != "HEAD":
                    self.wfile.write(said)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()


def answer(catalog: SqlCatalog, method: str, path: str, text: bytes) -> bytes:
    """Return what a request is answered with."""
    match path.removeprefix("/v1/").split("/"):
        case ["config"]:
            return b'{"defaults": {}, "overrides": {}}'
        case ["namespaces"]:
            catalog.create_namespace(tuple(json.loads(text)["namespace"]))
            return text
        case ["namespaces", namespace]:
            return json.dumps(
                {
                    "namespace": [namespace],
                    "properties": catalog.load_namespace_properties(namespace),
                }
            ).encode()
        case ["namespaces", namespace, "tables"]:
            asked = CreateTableRequest.model_validate({"location": None, **json.loads(text)})
            return loaded(
                catalog.create_table(
                    (namespace, asked.name),
                    asked.table_schema,
                    asked.location,
                    asked.partition_spec or PartitionSpec(),
                    asked.write_order or SortOrder(),
                    asked.properties,
                )
            )
        case ["namespaces", namespace, "tables", name] if method == "POST":
            change = CommitTableRequest.model_validate_json(text)
            table = catalog.load_table((namespace, name))
            done = catalog.commit_table(table, change.requirements, change.updates)
            return done.model_dump_json(by_alias=True).encode()
        case ["namespaces", namespace, "tables", name]:
            return loaded(catalog.load_table((namespace, name)))
    raise NotImplementedError(path)


def loaded(table: Table) -> bytes:
    """What is said of a table."""
    said = {"metadata-location": table.metadata_location, "metadata": table.metadata}
    return TableResponse.model_validate(said).model_dump_json(by_alias=True).encode()


def refusal(kind: str, message: str) -> bytes:
    """What is said instead."""
    return json.dumps({"error": {"message": message, "type": kind, "code": 400}}).encode()
