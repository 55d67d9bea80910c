"""The master: which Spark the settings ask for, and whether it is reachable.

Settings can ask for a server of Spark Connect in several ways, which Spark defines. Code that needs
a Spark with its own JVM rejects such settings; otherwise they would be ignored silently.

Spark itself retries an unreachable master for a minute, and then ends with its stacks. So saf tries
a connection to a master that has an address before it starts anything.
"""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from saf.errors import ConfigurationError, Unavailable

PATIENCE_SECONDS = 10.0
"""Time for a master to accept a connection, including the look-up of its name."""

SCHEMES = re.compile(r"(?:spark|k8s|sc)://(?:https?://)?([^/;]+).*")
PORTS = {"spark": 7077, "k8s": 443, "sc": 15002}
REMOTE = "sc://"


def remote(master: str, conf: Mapping[str, str]) -> str | None:
    """Return the address of the Spark Connect server that the settings ask for, or None.

    The address may contain a token: do not show it.

    Raises:
        ConfigurationError: a setting asks for Spark Connect, but none has an address.
    """
    asked = dict(_asking(master, conf))
    for where in asked.values():
        if where.startswith(REMOTE):
            return where
    for setting in asked:
        raise ConfigurationError(
            f"{setting} asks for Spark Connect without naming a server: use --remote "
            "sc://host:15002, or remove it, and set forwarder.master (or --master) to a master "
            "such as local[*], spark://host:7077, yarn or k8s://host:443"
        )
    return None


def refuse_connect(master: str, conf: Mapping[str, str]) -> None:
    """Raise if any setting asks for Spark Connect, where a Spark with a JVM is needed.

    Raises:
        ConfigurationError: the error names the setting.
    """
    for setting, _ in _asking(master, conf):
        raise ConfigurationError(
            f"{setting} asks for Spark Connect, which cannot be used here: remove it, and "
            "set forwarder.master (or --master) to a master such as local[*], spark://host:7077, "
            "yarn or k8s://host:443"
        )


def _asking(master: str, conf: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each setting that asks for Spark Connect, with its address."""
    if master.startswith(REMOTE):
        yield f"a master that begins with {REMOTE}", master
    for where, given in (("[forwarder.spark]", conf), ("what spark-submit was told", _submitted())):
        if address := given.get("spark.remote"):
            yield f"spark.remote (--remote) in {where}", address
        if given.get("spark.api.mode", "").lower() == "connect":
            yield f'spark.api.mode = "connect" in {where}', ""
    if address := os.environ.get("SPARK_REMOTE"):
        yield "the environment variable SPARK_REMOTE, or --remote,", address
    if os.environ.get("SPARK_API_MODE", "").lower() == "connect":
        yield "the environment variable SPARK_API_MODE", ""


def _submitted() -> dict[str, str]:
    """Return the settings that spark-submit passes on to sessions of Spark Connect."""
    parts = range(int(os.environ.get("PYSPARK_REMOTE_INIT_CONF_LEN", "0")))
    return {
        name: value
        for part in parts
        for name, value in json.loads(os.environ[f"PYSPARK_REMOTE_INIT_CONF_{part}"]).items()
    }


def addresses(master: str) -> list[tuple[str, int]]:
    """Return host and port of each possible place of a master; empty if it has no address.

    >>> addresses("spark://one:7077,two:7078"), addresses("k8s://https://[::1]:6443")
    ([('one', 7077), ('two', 7078)], [('::1', 6443)])
    >>> addresses("local[*]"), addresses("yarn"), addresses("sc://one/;token=t")
    ([], [], [('one', 15002)])
    """
    found = SCHEMES.fullmatch(master)
    if found is None:
        return []
    default = PORTS[master.partition(":")[0]]
    places = []
    for place in found[1].split(","):
        host, colon, port = place.strip("/").rpartition(":")
        known = bool(colon) and port.isdecimal()
        places.append(((host if known else place).strip("[]/"), int(port) if known else default))
    return places


def reach(master: str) -> None:
    """Return if a master accepts a connection at one of its addresses, or has no address.

    Raises:
        Unavailable: no address accepts a connection; the error contains the reasons.
    """
    places = addresses(master)
    if not places:
        return
    answers: queue.Queue[str | None] = queue.Queue()

    def ask(place: tuple[str, int]) -> None:
        answers.put(_problem(place))

    for place in places:
        # daemons, because the look-up of a name cannot be interrupted when the process ends
        threading.Thread(target=ask, args=[place], daemon=True).start()
    until = time.monotonic() + PATIENCE_SECONDS
    problems: list[str] = []
    while len(problems) < len(places):
        try:
            problem = answers.get(timeout=max(until - time.monotonic(), 0))
        except queue.Empty:
            problems.append(f"it does not answer within {PATIENCE_SECONDS:g} s")
            break
        if problem is None:
            return
        problems.append(problem)
    raise Unavailable(server_of(master), "; ".join(problems))


def server_of(master: str) -> str:
    """Return the name of a master for users; a Spark Connect server without possible secrets.

    >>> server_of("spark://host:7077"), server_of("sc://host/;token=t")
    ("Spark's master spark://host:7077", 'the server of Spark Connect sc://host:15002')
    """
    if not master.startswith(REMOTE):
        return f"Spark's master {master}"
    places = ",".join(f"{host}:{port}" for host, port in addresses(master))
    return f"the server of Spark Connect {REMOTE}{places}"


def _problem(place: tuple[str, int]) -> str | None:
    """Return why a place accepts no connection; None if it accepts one."""
    try:
        socket.create_connection(place, PATIENCE_SECONDS).close()
    except OSError as error:
        return f"{place[0]}:{place[1]}: {error.strerror or error}"
    return None
