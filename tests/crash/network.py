"""A network of its own, on which a machine may vanish: nothing answers there any more, not even no.

It is a network namespace with one address, joined to this machine by a pair of interfaces. A socket
that is made there stays there, so a thread of this process can listen as that machine.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_COUNT = itertools.count()
LIBC = ctypes.CDLL(None, use_errno=True)


class Elsewhere:
    """One machine on a network of its own; only root may make one."""

    def __init__(self) -> None:
        nth, process = next(_COUNT), os.getpid()
        number = process * 7 + nth
        network = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.name = f"saf-crash-{process}-{nth}"
        self._here, self._there = f"saf{process % 10**6}h{nth % 1000}", "there"
        self.address = f"{network}.2"
        _ip("netns", "add", self.name)
        _ip("link", "add", self._here, "type", "veth", "peer", self._there, "netns", self.name)
        _ip("addr", "add", f"{network}.1/24", "dev", self._here)
        _ip("link", "set", self._here, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self._there)
        self.vanish(False)

    def vanish(self, vanished: bool = True) -> None:
        """From now on nothing is heard of it; or it is back."""
        _ip("-n", self.name, "link", "set", self._there, "down" if vanished else "up")

    def listen(self) -> socket.socket:
        """A socket that listens there."""
        made: list[socket.socket] = []

        def make() -> None:
            with Path(f"/run/netns/{self.name}").open() as namespace:
                if LIBC.setns(namespace.fileno(), 0):  # of this thread alone
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server((self.address, 0)))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def close(self) -> None:
        """Take it away."""
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.name)


def elsewhere() -> Elsewhere | None:
    """A machine on a network of its own; None if this user may not make one."""
    try:
        return Elsewhere()
    except (OSError, subprocess.CalledProcessError):
        return None


def _ip(*arguments: Any) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
