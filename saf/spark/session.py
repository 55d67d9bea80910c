"""The Spark session of a forwarder: a `SparkSession.builder` with saf's settings, quiet on stderr.

Under spark-submit, the session is the submitted one, with its settings. Otherwise `start` has
PySpark start a JVM. PySpark's JVM ignores Ctrl-C, and exits when its standard input closes: so the
JVM ends with the driver, whatever ends the driver. PySpark waits for a new JVM's first answer
without a limit; saf kills a JVM that has not answered after `START_SECONDS`.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from saf.database import pinned
from saf.database.bounds import shut, sockets_to
from saf.errors import ConfigurationError, MissingExtra, SafError
from saf.spark import java
from saf.spark.java import address, java_options, log_in
from saf.spark.master import reach, refuse_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_CONF: Mapping[str, str] = MappingProxyType({})

LOGGING = Path(__file__).parent / "log4j2.properties"
OF_JVM = (
    *("spark.driver.memory", "spark.driver.extraClassPath", "spark.driver.extraLibraryPath"),
    *("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions"),
)
"""Settings that a JVM has to be started with."""
MAX_FAILURES = "4"
START_SECONDS = 120.0
"""Time for a JVM to start and to answer; a busy machine needs some seconds."""
OF_LAUNCH = "SAF_JVM"
"""Environment variable that marks the processes of one start of a JVM."""
LOCAL = re.compile(r"local(?:\[(\*|[0-9]{1,6})(,[0-9]{1,6})?\])?")

RAISED = re.compile(r"(?!at |SQLSTATE)[A-Za-z_][\w.]*(: .*)?$")
"""Pattern of the last line of a Python traceback."""


def settings(master: str) -> dict[str, str]:
    """Return the settings of a new session; settings from the caller override them."""
    options = [f"-Dlog4j2.configurationFile={LOGGING.as_uri()}", *java_options()]
    conf = {
        # Spark puts them before spark.driver.extraJavaOptions, which are the user's
        "spark.driver.defaultJavaOptions": shlex.join(options),
        # saf has its own progress bar, and stderr may be a log
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # a task may fail and run again: reading a batch twice gives the same rows
        "spark.task.maxFailures": MAX_FAILURES,
        # an expression that overflows the stack fails its own task, not the whole JVM
        "spark.executor.killOnFatalError.depth": "0",
        # no shuffle and no joins, so there is nothing to adapt
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
    }
    if is_local(master):
        # no web server, and no open port, unless a user asks for them
        conf |= {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
    if is_local(master) or "//localhost" in master or "//127." in master:
        # workers are on this machine, where saf is installed for this Python
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


def start(
    master: str, *, app_name: str = "saf forward", conf: Mapping[str, str] = NO_CONF
) -> SparkSession:
    """Return this process's session, as under spark-submit, or a new one on ``master``.

    Raises:
        MissingExtra: pyspark, pyarrow or ADBC is not installed.
        ConfigurationError: no Java was found, Spark rejects its settings, they ask for Spark
            Connect, or executors have no address of this host.
        Unavailable: the master's address does not answer.
        SafError: Spark's JVM did not start.
    """
    require_packages()
    refuse_connect(master, conf)
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkConf, SparkContext
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    # the caller reports what an expression raises; PySpark would print it with its stack
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
    _forget_ended_jvm()
    if pinned.active_context(SparkContext) is not None:
        return SparkSession.builder.getOrCreate()
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started the JVM, and this process
        pinned.connect_jvm(SparkContext)
        reach(SparkConf().get("spark.master") or "")
        return SparkSession.builder.getOrCreate()
    reach(master)
    chosen = settings(master) | dict(conf)
    # PySpark reads only the variable; Spark's own planner reads only the setting
    if python := os.environ.get("PYSPARK_PYTHON") or chosen.get("spark.pyspark.python"):
        chosen["spark.pyspark.python"] = python
    builder: Any = SparkSession.builder.master(with_attempts(master)).appName(app_name)
    with _environment(_of_jvm(chosen, local=is_local(master))):
        if pinned.gateway(SparkContext) is None:
            pinned.connect_jvm(SparkContext, _launch(chosen))
        log_in(pinned.jvm(SparkContext))
        try:
            session: SparkSession = builder.config(map=chosen).getOrCreate()
        except Py4JJavaError as error:
            raise ConfigurationError(
                f"Spark does not start with forwarder.master = {master!r} and the settings of "
                f"[forwarder.spark]: {first_line(error)}"
            ) from None
    _quiet_when_it_ends(session.sparkContext)
    return session


def abandon() -> None:
    """Give up a JVM that does not answer; its connections break, so waiting callers return."""
    from pyspark import SparkContext

    warnings.filterwarnings("ignore", message="Unable to cleanly shutdown Spark JVM")
    gateway = pinned.gateway(SparkContext)
    if gateway is None:
        return
    if gateway.proc is not None:  # under spark-submit, the JVM is not a child of this process
        gateway.proc.kill()
    shut(sockets_to(gateway.gateway_parameters.port))


def _launch(conf: Mapping[str, str]) -> Any:
    """Start a JVM and return its gateway.

    PySpark's own builder would put all settings on a command line, which all users of the machine
    can read. The JVM itself needs only `OF_JVM`; Spark gets the others afterwards.

    Raises:
        SafError: the JVM ended instead, after writing the reason to stderr, or did not answer.
    """
    from py4j.protocol import Py4JError
    from pyspark import SparkConf
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    needed = {name: value for name, value in conf.items() if name in OF_JVM}
    given = SparkConf(loadDefaults=False).setAll(list(needed.items()))
    mark, hangs = f"{OF_LAUNCH}={uuid4()}", threading.Event()

    def kill() -> None:
        hangs.set()
        for process in Path("/proc").glob("[0-9]*"):  # Spark's scripts start several
            with suppress(OSError):  # it has ended, or is another user's
                if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)

    limit = threading.Timer(START_SECONDS, kill)
    limit.daemon = True
    limit.start()
    try:
        with _environment(dict([mark.split("=")])):
            # standard output belongs to the driver
            return launch_gateway(given, {"stdout": 2})  # type: ignore[no-untyped-call]
    except (PySparkException, Py4JError, OSError) as error:
        if hangs.is_set():
            raise SafError(
                f"Spark's JVM has not answered within {START_SECONDS:g} s, and was killed: see "
                f"whether {os.environ.get('SAF_JAVA', 'java')} -version answers, and how busy "
                "this machine is"
            ) from error
        raise SafError(
            "Spark's JVM did not start (its output is above); Java and the memory "
            "(spark.driver.memory) are the usual reasons"
        ) from error
    finally:
        limit.cancel()


def _of_jvm(conf: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Return the environment variables of a JVM and its workers."""
    spec = find_spec("pyspark")
    assert spec is not None  # noqa: S101 `require_packages` has seen to it
    assert spec.origin is not None  # noqa: S101 it is a regular package
    python = conf.get("spark.pyspark.python")
    return {
        **java.find().environment(),
        **address(conf, local=local),
        # Spark in the same version as PySpark, wherever another one is installed
        "SPARK_HOME": str(Path(spec.origin).parent),
        **({"PYSPARK_PYTHON": python} if python else {}),
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, from which PySpark starts the JVM, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _forget_ended_jvm() -> None:
    """Have PySpark forget a JVM that has ended, so that the next session gets a new one."""
    from pyspark import SparkContext

    gateway = pinned.gateway(SparkContext)
    if gateway is not None and gateway.proc is not None and gateway.proc.poll() is not None:
        pinned.forget_jvm(SparkContext)


def _quiet_when_it_ends(context: Any) -> None:
    """Silence the traceback of the thread that Spark reports to, if the JVM ends first."""
    server = pinned.accumulator_server(context)
    handle = server.handle_error

    def handle_error(request: Any, address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | EOFError):
            handle(request, address)

    server.handle_error = handle_error


def require_packages() -> None:
    """Raise MissingExtra unless everything that forwarding needs is installed."""
    for package in ("pyspark", "pyarrow", "adbc_driver_postgresql"):
        if find_spec(package) is None:
            raise MissingExtra("forwarder", "forwarding")
