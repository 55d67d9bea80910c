"""The driver's JVM: started directly, in the background, with its classes from an archive.

Spark's own launcher would first start a shell, a Python and a second JVM to compute the command
line. Here the command line is computed from the few settings that matter to a JVM. Settings for
Spark itself never appear on it, because every user on the machine can read command lines.

The JVM ignores Ctrl-C, and exits when its standard input closes. So it lives exactly as long as the
driver, whatever ends the driver, unless the driver ends it first.

Loading and checking some 15,000 classes is most of a cold start. So the first run, when it is done,
writes them into an archive in the cache folder (class-data sharing); later runs map it into memory.
If the archive is missing, broken or from another Java, the JVM starts without it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from saf.errors import SafError
from saf.spark.children import left_to_itself
from saf.spark.identity import java_options
from saf.spark.java import Java, cache_folder, major

GATEWAY = ("org.apache.spark.deploy.SparkSubmit", "pyspark-shell")
START_SECONDS = 120
NO_SECURITY_ACTION = 24
STALE_SECONDS = 1800

# Options that Spark's launcher adds; a test compares. jdk.incubator.vector is left out: only
# linear algebra uses it, and it makes the JVM warn at each start.
OPENED = (
    *("java." + package for package in ("lang", "lang.invoke", "lang.reflect", "io", "net", "nio")),
    *("java." + package for package in ("util", "util.concurrent", "util.concurrent.atomic")),
    *("jdk.internal.ref", "sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
)
MODULES = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    # newer Javas forbid, or warn of, what Arrow and Netty do; older ones ignore these options
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "-Dderby.connection.requireAuthentication=false",
)

QUIET = (
    # hide warnings about the archive, which matter only to its builders; fatal errors remain
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
    f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}",
)

# The shell waits for the JVM, even after the driver ended. It writes the archive's size first,
# because a truncated archive kills a JVM: an archive is used only if its size was recorded and
# matches. A Java without an archive of its own classes to build upon leaves the draft empty. On a
# signal, the shell kills the JVM. For this, it must start the JVM in the background and pass its
# standard input on explicitly.
END = signal.SIGUSR1
TRAIN = (
    'target=$1; draft=$2; shift 2; exec 3<&0; "$@" <&3 3<&- & jvm=$!; trap "kill -9 $jvm" USR1; '
    'wait "$jvm" && [ -s "$draft" ] && wc -c <"$draft" >"$target.size" '
    '&& mv -f "$draft" "$target" || rm -f "$draft"'
)
SHELL = ("/bin/sh", "-c", TRAIN, "sh")
ARCHIVES_KEPT = 3  # some 160 MB each, for one Java and one set of options


@dataclass(frozen=True, kw_only=True)
class Jvm:
    """A JVM that is starting or running."""

    process: subprocess.Popen[bytes]
    folder: Path
    """A private folder, where the JVM writes how to reach it."""
    in_shell: bool
    """True if the process is a shell that started the JVM."""
    said: threading.Thread
    """The thread that copies the JVM's output to stderr until the JVM ends."""

    def address(self) -> tuple[int, str]:
        """Wait until the JVM is up; return the port and the secret of its gateway.

        Raises:
            SafError: the JVM ended instead, after writing the reason to stderr.
        """
        path = self.folder / "gateway"
        deadline = time.monotonic() + START_SECONDS
        try:
            while not path.exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    self.said.join(1)
                    raise SafError(
                        "Spark's JVM did not start (its output is above); Java and the memory "
                        "(spark.driver.memory) are the usual reasons"
                    )
                time.sleep(0.01)
            data = path.read_bytes()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        (port, length) = struct.unpack(">ii", data[:8])
        return port, data[8 : 8 + length].decode()

    def kill(self) -> None:
        """Kill the JVM immediately, even if it is stopped and handles no signals."""
        self.process.send_signal(END if self.in_shell else signal.SIGKILL)


def environment(java: Java) -> dict[str, str]:
    """Return the environment of a JVM and its workers."""
    env = {
        **os.environ,
        "SPARK_CONNECT_MODE": "0",
        "PYTHONHASHSEED": "0",
        # each worker would start numpy's threads, and never use them
        "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1"),
        "JAVA_HOME": str(java.home),
    }
    # With SPARK_HOME, workers import pyspark from a zip without compiled files, which costs each of
    # them half a second. Without SPARK_HOME, they import the installed package.
    env.pop("SPARK_HOME", None)
    return env


def launch(java: Java, conf: Mapping[str, str], env: Mapping[str, str]) -> Jvm:
    """Start a JVM for a driver with the given settings; return immediately."""
    folder = Path(tempfile.mkdtemp(prefix="saf-"))
    line = command(java, conf)
    # Standard output belongs to the driver. The JVM outlives the driver, by seconds if it writes an
    # archive, and a reader of the driver's stderr must not wait for that: so the JVM gets a pipe.
    process = subprocess.Popen(  # noqa: S603 no part of it is from outside
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**env, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(folder / "gateway")},
        preexec_fn=_ignore_interrupts,  # noqa: PLW1509 the one system call is safe after a fork
    )
    assert process.stdout is not None  # noqa: S101 it is a pipe
    reader = threading.Thread(target=_pass_on, args=[process.stdout], daemon=True)
    reader.start()
    in_shell = line[: len(SHELL)] == [*SHELL]
    return Jvm(process=left_to_itself(process), folder=folder, in_shell=in_shell, said=reader)


def command(java: Java, conf: Mapping[str, str]) -> list[str]:
    """Return the command line of a JVM that uses the archive, or creates it."""
    # Java 24 no longer has sun.security.action, and warns about the option at each start
    gone = "sun.security.action" if major(java.version) >= NO_SECURITY_ACTION else "\0"
    base = [
        *(option for option in MODULES if gone not in option),
        *QUIET,
        f"-Xmx{conf.get('spark.driver.memory', '1g')}",
        "-XX:-UsePerfData",
        *java_options(),
        *conf.get("spark.driver.extraJavaOptions", "").split(),
    ]
    classpath = ":".join(
        part for part in (conf.get("spark.driver.extraClassPath"), f"{_spark()}/jars/*") if part
    )
    runtime = [str(java.executable), "-cp", classpath, *base]
    target = archive(java, [classpath, *base])
    if target is None:
        return [*runtime, *GATEWAY]
    if _is_whole(target):
        with suppress(OSError):
            os.utime(target)  # keep archives in use
        return [*runtime, "-Xshare:auto", f"-XX:SharedArchiveFile={target}", *GATEWAY]
    draft = _claim(target)
    if draft is None:
        return [*runtime, *GATEWAY]
    _prune(target.parent)
    training = [*runtime, f"-XX:ArchiveClassesAtExit={draft}", *GATEWAY]
    return [*SHELL, str(target), str(draft), *training]


def archive(java: Java, options: list[str]) -> Path | None:
    """Return the path of the archive, existing or not; None if no file can be written there."""
    key = hashlib.sha256("\0".join([str(java), str(java.home), *options]).encode()).hexdigest()
    folder = cache_folder() / "jvm"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        usable = folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK)
    except OSError:
        return None
    return folder / f"{key[:16]}.jsa" if usable else None


def _claim(target: Path) -> Path | None:
    """Return the file to write the archive to; None if another run is writing it."""
    draft = target.with_name(f".{target.name}.draft")
    try:
        if draft.exists() and time.time() - draft.stat().st_mtime > STALE_SECONDS:
            draft.unlink(missing_ok=True)
        draft.touch(exist_ok=False)
    except OSError:
        return None
    return draft


def _size_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.size")


def _is_whole(target: Path) -> bool:
    try:
        return target.stat().st_size == int(_size_file(target).read_text())
    except (OSError, ValueError):
        return False


def _prune(folder: Path) -> None:
    """Remove all archives but those used last. A JVM that has mapped an archive keeps it."""
    by_age = sorted(folder.glob("*.jsa"), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in by_age[ARCHIVES_KEPT - 1 :]:
        old.unlink(missing_ok=True)
        _size_file(old).unlink(missing_ok=True)


def _pass_on(output: IO[bytes]) -> None:
    # the process that ends the JVM may have closed the pipe already
    with suppress(ValueError, OSError):
        while data := os.read(output.fileno(), 65536):
            os.write(2, data)


def _spark() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None  # noqa: S101 checked by start()
    assert spec.origin is not None  # noqa: S101
    return Path(spec.origin).parent


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
