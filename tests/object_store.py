"""An object store for tests: moto's S3 in a process of its own, one for a whole run.

A bucket's name says how the store behaves there; see `BEHAVES`. While a bucket is `down`, each
request for it is answered by 503.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from tests.processes import CONTEXT

Environment = dict[str, Any]
Start = Callable[[str, list[tuple[str, str]]], Any]

DENIED = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
KEY = re.compile("<Key>(.*?)</Key>")
NOT_DELETED = b"<DeleteResult>%s</DeleteResult>"
NOT_THIS = "<Error><Key>%s</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
KEYS = ("saf-access", "hunter2-canary")


def _forgets_conditions(asked: Environment) -> bool:
    asked.pop("HTTP_IF_NONE_MATCH", None)
    return True


BEHAVES: dict[str, Callable[[Environment], bool]] = {
    "unconditional": _forgets_conditions,
    "undeletable": lambda asked: (
        asked["REQUEST_METHOD"] != "DELETE" and not asked["QUERY_STRING"].startswith("delete")
    ),
    "readonly": lambda asked: asked["REQUEST_METHOD"] in ("GET", "HEAD"),
}
"""What to do with a request, by what the bucket's name begins with; False: deny it."""


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """The server."""

    port: int
    ask: Connection
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def address(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What the clients of a process find in their environment."""
        key, secret = KEYS
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
        }

    @property
    def options(self) -> dict[str, str]:
        """What deltalake is told; it soon stops trying again."""
        return {**self.environment, "max_retries": "1"}

    @property
    def secrets(self) -> dict[str, SecretStr]:
        """The same, as settings have it."""
        return {name: SecretStr(value) for name, value in self.options.items()}

    @property
    def properties(self) -> dict[str, SecretStr]:
        """What pyiceberg is told."""
        key, secret = KEYS
        told = {
            "s3.endpoint": self.address,
            "s3.region": "us-east-1",
            "s3.access-key-id": key,
            "s3.secret-access-key": secret,
        }
        return {name: SecretStr(value) for name, value in told.items()}

    def bucket(self, kind: str = "bucket") -> str:
        """Return the name of a new bucket, which is empty."""
        name = f"{kind}-{next(self.numbers)}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self) -> Any:
        """A client of somebody else's."""
        import boto3

        key, secret = KEYS
        return boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name="us-east-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
        )

    def keys(self, bucket: str) -> list[str]:
        """The names of a bucket's objects."""
        found = self.client().list_objects_v2(Bucket=bucket)
        return [one["Key"] for one in found.get("Contents", ())]

    def copied(self, bucket: str, folder: Path) -> Path:
        """Return a folder with a copy of a bucket."""
        client = self.client()
        for key in self.keys(bucket):
            file = folder / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())
        return folder

    @contextmanager
    def down(self, bucket: str) -> Iterator[None]:
        """Answer each request for a bucket by 503."""
        self._tell(bucket, 503)
        try:
            yield
        finally:
            self._tell(bucket, None)

    def slow(self, bucket: str, seconds: float) -> None:
        """Answer each request for a bucket only after so many seconds."""
        self._tell(bucket, seconds)

    def _tell(self, bucket: str, how: float | None) -> None:
        self.ask.send((bucket, how))
        assert self.ask.recv() == bucket


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start a store, which ends with the block."""
    ours, its = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(its,), daemon=True)
    process.start()
    try:
        yield ObjectStore(port=ours.recv(), ask=ours)
    finally:
        process.kill()
        process.join()


def _serve(ask: Connection) -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = DomainDispatcherApplication(create_backend_app)
    told: dict[str, float | None] = {}
    writing = threading.Lock()

    def application(asked: Environment, start: Start) -> Iterable[bytes]:
        bucket = asked["PATH_INFO"].split("/")[1]
        how = told.get(bucket)
        if how == 503:
            start("503 Service Unavailable", [])
            return [b""]
        if how is not None:
            time.sleep(how)
        behaves = BEHAVES.get(bucket.partition("-")[0])
        made = asked["REQUEST_METHOD"] == "PUT" and asked["PATH_INFO"] == f"/{bucket}"
        if behaves and not made and not behaves(asked):
            if asked["QUERY_STRING"].startswith("delete"):  # denied object by object
                start("200 OK", [("Content-Type", "application/xml")])
                length = int(asked["CONTENT_LENGTH"])
                keys = KEY.findall(asked["wsgi.input"].read(length).decode())
                return [NOT_DELETED % "".join(NOT_THIS % key for key in keys).encode()]
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [DENIED]
        conditional = writing if "HTTP_IF_NONE_MATCH" in asked else nullcontext()
        with conditional:  # moto looks first, and writes then
            return moto(asked, start)  # type: ignore[no-any-return]

    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ask.send(server.port)
    while True:
        try:
            bucket, how = ask.recv()
        except EOFError:
            return
        told[bucket] = how
        ask.send(bucket)
