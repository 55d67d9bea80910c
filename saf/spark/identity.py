"""The user and the host that Spark's JVM runs as, where the system has no name for them.

Some containers run as a user id that has no entry in /etc/passwd, such as those of OpenShift. Java
then has neither a name nor a home for the user, and Hadoop's login refuses the id. It is given
both, and Hadoop a user with this name, as Hadoop's ``simple`` authentication would.

A host's own name may not resolve. Spark looks it up before anything else, even to run everything
in one process, for which the address of the machine itself is enough.
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
    """Return a name for the user of this process if the system has none; else None."""
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        return next(filter(None, map(os.environ.get, NAMED_BY)), f"uid-{number}")
    return None


def java_options() -> list[str]:
    """Return what tells a JVM the name and the home of a user for whom the system has none."""
    name = nameless_user()
    if name is None:
        return []
    home = os.environ.get("HOME", "")
    home = home if home.startswith("/") else tempfile.gettempdir()
    return [f"-Duser.name={name}", f"-Duser.home={home}"]


def log_in(jvm: Any) -> None:
    """Log in to Hadoop a user without a name; Hadoop's own login would refuse the id."""
    name = nameless_user()
    if name is not None:
        hadoop = jvm.org.apache.hadoop.security.UserGroupInformation
        hadoop.setLoginUser(hadoop.createRemoteUser(name))


def address(conf: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Return the environment in which Spark starts although the host's name does not resolve.

    ``local``: everything runs in one process.

    Raises:
        ConfigurationError: executors elsewhere need an address, and nobody has given one.
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
