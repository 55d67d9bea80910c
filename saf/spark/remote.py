"""The runner on Spark Connect, where only DataFrames exist and the client has no JVM.

Each item of work is a row, a row is a partition, and a task is a function for ``mapInArrow`` that
forwards the items of its partition and returns receipts. The cluster's Python must have the same
version of saf as this machine; this is checked before anything is forwarded. Classifiers in SQL
need a Spark of your own: their messages wait.

Items and rules are sealed (`Seal`): a server may write whole plans to its log, with their rows and
functions, e.g. plans of executions that a session abandoned. So values that contain a password are
encrypted there, and the key travels separately: in a file of the session that only its tasks read.
"""

from __future__ import annotations

import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from saf.database import Dsn
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import ConfigurationError, JobFailed, MissingExtra, SparkGone
from saf.spark.master import reach, server_of
from saf.spark.session import first_line, require_packages

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.connect.session import SparkSession


T = TypeVar("T")

ATTEMPTS = 4
"""Retries at a server that does not answer: for some five seconds, not ten minutes."""

ASKED_SECONDS = 60.0
"""How long to trust the number of slots that a cluster reported."""

NEEDED = ("grpc", "grpc_status", "google.rpc", "cryptography")

PARTS = 4096
"""More partitions than any cluster has slots: the cluster creates one partition per slot."""

NO_SQL = (
    "classifiers in SQL are not evaluated over Spark Connect: forward with a forwarder.master of "
    "your own (local[*], spark://…), or write an arrow or python one"
)

ITEM = "item"
"""Name of the column with a sealed item of work."""

PARALLELISM = "spark.sql.leafNodeDefaultParallelism"


class ConnectRunner:
    """Runs items of work on a cluster behind Spark Connect; a `saf.forwarding.runner.Runner`.

    Args:
        remote: The server's address, in the form of ``SPARK_REMOTE``; it may contain a token.
        conf: Settings of the session.
    """

    def __init__(self, remote: str, conf: Mapping[str, str]) -> None:
        self._remote = remote
        self._conf = conf
        self._session: SparkSession | None = None
        self._seal: Seal | None = None
        self._slots = 1
        self._asked = float("-inf")

    def start(self, work: Sequence[Work]) -> None:  # noqa: ARG002 - a runner's signature
        """Connect, unless connected, and ask the cluster for its slots and versions.

        Raises:
            MissingExtra: Spark Connect's client lacks a package.
            Unavailable: the address does not answer.
            ConfigurationError: the server rejects the session, or its Python has another saf.
            SparkGone: the server answered before, but no longer does.
        """
        if self._session is None:
            self._session = connected(self._remote, self._conf)
            self._seal = _translated(lambda: Seal.of(self._spark))
        if time.monotonic() - self._asked > ASKED_SECONDS:
            self._slots = _translated(lambda: slots(self._spark))
            self._asked = time.monotonic()

    @property
    def _spark(self) -> SparkSession:
        assert self._session is not None  # noqa: S101 - `start` comes first
        return self._session

    def is_here(self, sources: int) -> bool:  # noqa: ARG002 - a runner's signature
        """Return False: work is the cluster's."""
        return False

    def slots(self) -> int:
        """Return how many tasks the cluster runs at a time, according to its last answer."""
        return self._slots

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        """Run one job; turn any failure into one readable error."""
        return _translated(lambda: self._run(work, rules, group))

    def _run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        import pyarrow as pa

        from saf.spark.expressions import without_sql

        seal = self._seal
        assert seal is not None  # noqa: S101 - `start` comes first
        parts = [without_sql(item, NO_SQL) for item in work]
        with suppress(Exception):  # where this setting is forbidden, some items share a task
            self._spark.conf.set(PARALLELISM, str(len(parts)))
        self._spark.addTag(group)
        try:
            packed = pa.table({ITEM: [seal.closed(numbered) for numbered in enumerate(parts)]})
            function = task(seal.name, seal.closed(rules))
            done = self._spark.createDataFrame(packed).mapInArrow(function, "said binary")
            return [
                receipt
                for data in done.toArrow()["said"].to_pylist()
                for receipt in pickle.loads(data)  # noqa: S301 - our own bytes  # nosec B301
            ]
        finally:
            self._spark.removeTag(group)

    def stop(self) -> None:
        """End the session, if one was started. The cluster keeps running."""
        if self._session is not None:
            self._session.stop()

    def let_go(self, source: Dsn) -> None:
        """Do nothing: workers end, or close the connection a minute after its last use."""

    def cancel(self, group: str) -> None:
        """Cancel the job, unless the server no longer answers."""
        with suppress(Exception):  # the server may not answer, and be disconnected
            self._spark.interruptTag(group)

    def abandon(self) -> None:
        """Give up a server that no longer answers."""
        with suppress(Exception):
            self._spark.client.close()


def connected(remote: str, conf: Mapping[str, str]) -> SparkSession:
    """Return a new session at a server of Spark Connect.

    Raises:
        MissingExtra: Spark Connect's client lacks a package.
        Unavailable: the address does not answer.
        ConfigurationError: the server rejects the session.
    """
    require_packages()
    if any(find_spec(package) is None for package in NEEDED):
        raise MissingExtra("connect", "forwarding over Spark Connect")
    reach(remote)
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession

    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")  # the error follows
    given = {name: value for name, value in conf.items() if name != "spark.remote"}
    try:
        builder: Any = SparkSession.builder.remote(remote)
        session: SparkSession = builder.config(map=given).create()
        session.client.set_retry_policies([DefaultPolicy(max_retries=ATTEMPTS)])
    except PySparkException as error:
        raise ConfigurationError(
            f"{server_of(remote)} gives no session with its address and the settings of "
            f"[forwarder.spark]: {first_line(error)}"
        ) from None
    return session


@dataclass(frozen=True)
class Seal:
    """The key of one session, and the name of its file in the session."""

    name: str
    key: bytes = field(repr=False)

    @classmethod
    def of(cls, session: SparkSession) -> Seal:
        """Return a new seal, which the tasks of a session can open."""
        from cryptography.fernet import Fernet

        seal = cls(f"saf-{uuid4()}.key", Fernet.generate_key())
        with TemporaryDirectory() as folder:  # private to this user
            file = Path(folder) / seal.name
            file.write_bytes(seal.key)
            session.addArtifact(str(file), file=True)
        return seal

    def closed(self, value: Any) -> bytes:
        """Return a value as encrypted bytes."""
        from cryptography.fernet import Fernet

        return Fernet(self.key).encrypt(pickle.dumps(value))


def opened(name: str, sealed: bytes) -> Any:
    """Decrypt a value in a task of the session; ``name`` is that of the file with the key."""
    from cryptography.fernet import Fernet
    from pyspark import SparkFiles

    key = Path(SparkFiles.get(name)).read_bytes()
    return pickle.loads(Fernet(key).decrypt(sealed))  # noqa: S301 - our own bytes  # nosec B301


def slots(spark: Any) -> int:
    """Check a cluster's version of saf; return how many tasks the cluster runs at a time.

    The session's settings stay unchanged.

    Raises:
        ConfigurationError: the Python of its tasks has another version of saf, or lacks saf.
    """
    from pyspark.errors import PySparkException

    before: str | None = None
    with suppress(Exception):
        before = spark.conf.get(PARALLELISM, None)
        spark.conf.unset(PARALLELISM)
    try:
        versions = spark.range(PARTS).mapInArrow(greet, "version string").toArrow()["version"]
    except PySparkException as error:
        if "No module named" not in str(error) and "PYTHON_VERSION_MISMATCH" not in str(error):
            raise
        raise ConfigurationError(
            "the Python of the cluster's tasks lacks packages that saf needs: the Python of this "
            f"machine and saf-outbox[connect]=={version('saf-outbox')}: {first_line(error)}"
        ) from None
    finally:
        if before is not None:
            with suppress(Exception):
                spark.conf.set(PARALLELISM, before)
    here = version("saf-outbox")
    others = sorted({*versions.to_pylist()} - {here})
    if others:
        raise ConfigurationError(
            f"the Python of the cluster's tasks has saf {', '.join(others)}, and this machine has "
            f"{here}: install the same there"
        )
    return len(versions)


def greet(partition: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return, from a task, the version of saf installed there."""
    import pyarrow as pa

    require_packages()
    import cryptography.fernet  # noqa: F401 - tasks open seals with it

    for _ in partition:
        pass
    yield pa.RecordBatch.from_pydict({"version": [version("saf-outbox")]})


def task(key: str, rules: bytes) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow: items in, receipts out.

    Items and ``rules`` are sealed; ``key`` names the file with the key that opens them.
    """

    def run(partition: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from saf.forwarding.runner import item_alone

        for batch in partition:
            for handed in batch[ITEM]:
                number, item = opened(key, handed.as_py())
                receipts = item_alone(number, item, opened(key, rules))
                yield pa.RecordBatch.from_pydict({"said": [pickle.dumps(receipts)]})

    return run


def _translated(ask: Callable[[], T]) -> T:
    """Return the result of ``ask``; translate errors of Spark Connect into a lost server or job.

    Raises:
        SparkGone: the server does not answer, or has restarted.
        JobFailed: the server answered with the failure.
    """
    import grpc
    from pyspark.errors import PySparkException

    try:
        return ask()
    except (grpc.RpcError, ValueError, OSError) as error:  # a closed channel is a ValueError
        raise SparkGone(_words(error)) from error
    except PySparkException as error:
        code = getattr(error, "getGrpcStatusCode", lambda: None)()
        is_lost = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        closed = "Channel closed" in str(error)  # by `ConnectRunner.abandon`
        if is_lost or closed or "INVALID_HANDLE." in str(error):
            raise SparkGone(_words(error)) from error
        raise JobFailed(_words(error)) from error


def _words(error: BaseException) -> str:
    """Return an error's own words, without those that gRPC adds."""
    details = re.search(r'^\s*details = "(.*)"$', str(error), re.MULTILINE)
    return details[1] if details else first_line(error)
