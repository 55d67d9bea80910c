"""The Spark session of a forwarder: quick to start, quiet, and never in the way of Ctrl-C.

Under spark-submit, the session is the submitted one, with its settings. Otherwise `start` creates a
session, and `prestart` starts its JVM in the background while the caller does something else.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from saf.database import pinned
from saf.database.patience import shut, sockets_to
from saf.errors import ConfigurationError, MissingExtra
from saf.spark import java
from saf.spark.daemon import AHEAD, start_ahead
from saf.spark.identity import address, log_in
from saf.spark.jvm import Jvm, environment, launch
from saf.spark.master import reach, refuse_connect

if TYPE_CHECKING:
    from pyspark import SparkContext

NO_CONF: Mapping[str, str] = MappingProxyType({})

MAX_FAILURES = "4"
LOCAL = re.compile(r"local(?:\[(\*|[0-9]{1,6})(,[0-9]{1,6})?\])?")

RAISED = re.compile(r"(?!at |SQLSTATE)[A-Za-z_][\w.]*(: .*)?$")
"""Pattern of the last line of a Python traceback."""

_launched: Jvm | None = None


def settings(master: str, *, quick: bool = False) -> dict[str, str]:
    """Return the settings of a new session; settings from the caller override them."""
    conf = {
        "spark.driver.memory": "1g",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # workers on the same machine: less kernel work than TCP, and no port to connect to
        "spark.python.unix.domain.socket.enabled": "true",
        # a task may fail and run again: reading a batch twice gives the same rows
        "spark.task.maxFailures": MAX_FAILURES,
        # an expression that overflows the stack fails its own task, not the whole JVM
        "spark.executor.killOnFatalError.depth": "0",
        # no tables are stored: do not load Hive
        "spark.sql.catalogImplementation": "in-memory",
        # no shuffle and no joins, so there is nothing to adapt or to wait for
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.locality.wait": "0",
        # workers are forked with everything imported
        "spark.python.daemon.module": "saf.spark.daemon",
        # Python stacks of DataFrame calls, useful only in notebooks
        "spark.python.sql.dataFrameDebugging.enabled": "false",
    }
    if is_local(master):
        conf |= {
            # no web server, and no open port, unless a user asks for them
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            # one process runs everything, so only one Python is possible
            "spark.pyspark.python": sys.executable,
        }
        # one small heap: the collector that starts fastest
        conf["spark.driver.extraJavaOptions"] = "-XX:+UseSerialGC"
        if quick:
            # optimizing code that runs once is not worth seconds of two cores
            conf |= {
                "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
                "spark.sql.codegen.wholeStage": "false",
                "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            }
    elif "//localhost" in master or "//127." in master:
        conf["spark.pyspark.python"] = sys.executable
    return conf


def is_local(master: str) -> bool:
    """Return whether a master means threads of the driver.

    >>> is_local("local"), is_local("local[2]"), is_local("spark://127.0.0.1:7077")
    (True, True, False)
    """
    return master == "local" or master.startswith("local[")


def with_room(master: str) -> str:
    """Return the master, where ``local[*]`` gets one slot more than cores.

    The extra slot is for little work beside deep backlogs. An explicit number is kept.

    >>> with_room("local[2]"), with_room("spark://host:7077")
    ('local[2]', 'spark://host:7077')
    """
    local = LOCAL.fullmatch(master)
    if local is None or local[1] != "*":
        return master
    return f"local[{(os.cpu_count() or 1) + 1}{local[2] or ''}]"


def with_attempts(master: str) -> str:
    """Return a local master that runs a task again if its worker was killed.

    Other masters do this anyway. A local master ignores ``spark.task.maxFailures``.

    >>> with_attempts("local"), with_attempts("local[*]"), with_attempts("local[2,1]")
    ('local[1,4]', 'local[*,4]', 'local[2,1]')
    """
    local = LOCAL.fullmatch(master)
    return master if local is None or local[2] else f"local[{local[1] or 1},{MAX_FAILURES}]"


def first_line(error: BaseException) -> str:
    """Return the message of a Spark error, without the stack that follows.

    >>> first_line(Exception("Thrown: Traceback:\\n File x\\nKeyError: 'k'\\n at a.B(C.java:1)"))
    "Thrown: Traceback: KeyError: 'k'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own_lines = [line for line in lines if not line.startswith("An error occurred while calling")]
    first = (own_lines or lines or [type(error).__name__])[0].lstrip(": ")
    if first.endswith(":"):  # the traceback of a Python error in a task ends with the error
        first = next(
            (f"{first} {line}" for line in reversed(own_lines) if RAISED.match(line)), first
        )
    return first.rstrip(".")


def prestart(
    master: str,
    *,
    conf: Mapping[str, str] = NO_CONF,
    quick: bool = False,
) -> None:
    """Start the JVM in the background; `start` with the same arguments uses it."""
    global _launched  # noqa: PLW0603 a process has one JVM
    require_packages()
    if _launched is None and "PYSPARK_GATEWAY_PORT" not in os.environ and not _has_jvm():
        chosen, found = settings(master, quick=quick) | dict(conf), java.find()
        env = environment(found) | address(chosen, local=is_local(master))
        if is_local(master) and _forks_ours(chosen):
            env[AHEAD] = start_ahead(env)
        _launched = launch(found, chosen, env)


def start(
    master: str,
    *,
    app_name: str = "saf forward",
    conf: Mapping[str, str] = NO_CONF,
    quick: bool = False,
) -> SparkContext:
    """Return the active context, as under spark-submit, or a new one on ``master``.

    ``quick`` starts sooner and works slower: use it for runs with little work.

    Raises:
        MissingExtra: pyspark, pyarrow or ADBC is not installed.
        ConfigurationError: no Java was found, Spark rejects its settings, they ask for Spark
            Connect, or executors have no address of this host.
        Unavailable: the master's address does not answer.
        SafError: Spark's JVM did not start.
    """
    require_packages()
    refuse_connect(master, conf)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        reach(master)
        prestart(master, conf=conf, quick=quick)
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkConf, SparkContext
    from pyspark.logger import PySparkLogger

    # the caller reports what an expression raises; PySpark would print it with its stack
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
    if submitted and pinned.active_context(SparkContext) is None:
        pinned.launch_gateway(SparkContext)
        reach(SparkConf().get("spark.master") or "")
    if submitted or pinned.active_context(SparkContext) is not None:
        return SparkContext.getOrCreate()
    if pinned.gateway(SparkContext) is None:
        _connect(SparkContext)
    chosen = {**settings(master, quick=quick), **conf}
    # For PySpark, the environment wins; without it, PySpark ignores this setting in a conf.
    python = os.environ.get("PYSPARK_PYTHON") or chosen.get("spark.pyspark.python")
    if python:
        os.environ["PYSPARK_PYTHON"] = python
        chosen["spark.pyspark.python"] = python
    conf_ = SparkConf().setMaster(with_attempts(master)).setAppName(app_name)
    log_in(pinned.jvm(SparkContext))
    try:
        context = SparkContext.getOrCreate(conf_.setAll(list(chosen.items())))
    except Py4JJavaError as error:
        raise ConfigurationError(
            f"Spark does not start with forwarder.master = {master!r} and the settings of "
            f"[forwarder.spark]: {first_line(error)}"
        ) from None
    _quiet_when_it_ends(context)
    return context


def stop(spark: SparkContext) -> None:
    """Stop Spark cleanly, but skip the second for which PySpark then waits for a thread."""
    server = pinned.accumulator_server(spark, take=True)
    if server is not None:
        server.server_shutdown = True
        threading.Thread(target=server.shutdown, daemon=True).start()
    spark.stop()


def abandon() -> None:
    """Give up a JVM that does not answer; its connections break, so waiting callers return."""
    from pyspark import SparkContext

    warnings.filterwarnings("ignore", message="Unable to cleanly shutdown Spark JVM")
    if _launched is not None:
        _launched.kill()
    gateway = pinned.gateway(SparkContext)
    if gateway is not None:
        shut(sockets_to(gateway.gateway_parameters.port))


def _quiet_when_it_ends(context: Any) -> None:
    """Silence the traceback of the thread that Spark reports to, if the JVM ends first."""
    server = pinned.accumulator_server(context)
    handle = server.handle_error

    def handle_error(request: Any, address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | EOFError):
            handle(request, address)

    server.handle_error = handle_error


def _connect(context: Any) -> None:
    """Give PySpark the JVM as spark-submit does, through the environment, for this one call."""
    global _launched  # noqa: PLW0603 a JVM that did not come up is not asked again
    assert _launched is not None  # noqa: S101 prestart() has seen to it
    jvm, _launched = _launched, None
    port, secret = jvm.address()
    _launched = jvm
    os.environ |= {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            pinned.launch_gateway(context)
    finally:
        del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]


def _forks_ours(conf: Mapping[str, str]) -> bool:
    """Return whether workers use this Python, and fork from saf's daemon."""
    python = os.environ.get("PYSPARK_PYTHON") or conf.get("spark.pyspark.python")
    daemon = conf.get("spark.python.daemon.module"), conf.get("spark.python.use.daemon", "true")
    return python == sys.executable and daemon == ("saf.spark.daemon", "true")


def _has_jvm() -> bool:
    context = sys.modules.get("pyspark.core.context")
    return context is not None and pinned.gateway(context.SparkContext) is not None


def require_packages() -> None:
    """Raise MissingExtra unless everything that forwarding needs is installed."""
    for package in ("pyspark", "pyarrow", "adbc_driver_postgresql"):
        if find_spec(package) is None:
            raise MissingExtra("forwarder", "forwarding")
