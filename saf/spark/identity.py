"""User and host for Spark's JVM, on systems that have no name for them.

Some containers, such as OpenShift's, run as a user id without an entry in /etc/passwd. Java then
has neither a name nor a home for the user, and Hadoop's login rejects the id. saf supplies both,
and logs a user with this name in to Hadoop, as Hadoop's ``simple`` authentication would.

A host's own name may not resolve. Spark looks it up before anything else, even to run everything
in one process, where the loopback address is enough.
"""

from __future__ import annotations

import os
import pwd
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from saf.errors import ConfigurationError

HERE = "127.0.0.1"
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
            return {"SPARK_LOCAL_IP": HERE}
        if driver := conf.get("spark.driver.host"):
            return {"SPARK_LOCAL_HOSTNAME": driver}
        raise ConfigurationError(
            f"the name of this host, {name!r}, does not resolve, and executors elsewhere need its "
            "address: add it to /etc/hosts, or set the environment variable SPARK_LOCAL_IP"
        ) from None
    return {}
