"""The watch that ends waits, in a process that has no file descriptors left for a while."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, resource, socket, threading
from saf.database.patience import answer_within, shut

here, there = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    threading.Timer(1, lambda: [os.close(one) for one in taken]).start()
with answer_within(0.1, lambda: shut([here.fileno()])):
    assert here.recv(1) == b""
"""


def test_a_wait_that_cannot_be_ended_for_want_of_descriptors_is_ended_later() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], timeout=20, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
