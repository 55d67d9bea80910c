"""Named places where a process can be made to die, for tests of what survives it.

The seven steps of store-and-forward, in order:

    business_dml  outbox_insert  application_commit         in the application
    mom_insert    mom_commit                                at the destination
    mark_forwarded  mark_commit                             back at the source

``SAF_FAILPOINT=mom_commit`` kills the process group there with SIGKILL, ``mom_commit:3`` at the
third time this process comes by. Unset, a point costs one comparison per chunk.
"""

from __future__ import annotations

import os
import signal

_NAME, _, _COUNT = os.environ.get("SAF_FAILPOINT", "").partition(":")
_left = int(_COUNT or 1)


def fail_point(name: str) -> None:
    """Die here if SAF_FAILPOINT says so."""
    if name != _NAME:
        return
    global _left  # noqa: PLW0603 - counts per process, as SAF_FAILPOINT promises
    _left -= 1
    if _left == 0:
        os.killpg(0, signal.SIGKILL)
