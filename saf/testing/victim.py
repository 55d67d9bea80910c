"""A process that stores chunks at a destination, and may be killed on the way.

It reads settings and chunks from stdin, and writes a line for each stored chunk. `start` starts the
process, for `saf.testing.conformance`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from saf.destinations import Chunk
    from saf.destinations.settings import DestinationSettings

PROGRAM = "from saf.testing.victim import main; main()"
READY, STORED = "ready", "stored"


def start(
    settings: DestinationSettings, chunks: Sequence[Chunk], *, fail_point: str = ""
) -> subprocess.Popen[bytes]:
    """Start the process in its own process group; it kills itself at ``fail_point``."""
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "SAF_FAILPOINT": fail_point,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - a pipe
    with process.stdin as given:
        pickle.dump((settings, list(chunks)), given)
    return process


def main() -> None:
    """Store all chunks."""
    settings, chunks = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own bytes  # nosec B301
    _say(READY, sys.stdout)
    with closing(settings.open("conformance")) as destination:
        for number, chunk in enumerate(chunks):
            destination.store(chunk, exactly_once=settings.capabilities.exactly_once)
            _say([STORED, number], sys.stdout)


def _say(report: object, out: IO[str]) -> None:
    out.write(json.dumps(report) + "\n")
    out.flush()
