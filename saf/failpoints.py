"""Named places where tests can kill a process, to see what survives.

The seven steps of store-and-forward, in order:

    business_dml  outbox_insert  application_commit         in the application
    mom_insert    mom_commit                                at the destination
    mark_forwarded  mark_commit                             back at the source

those of routers, of routes that share, of transforms whose results are kept, and of messages that
wait for a route: resolved, chosen, transformed, unrouted_expired, routed

and those of a receiver: receive_read, receive_handled, receive_settled, receive_committed, and
attempt_counted, which comes before a failed message is tried alone. A dispatcher has
dispatch_answered, after each answer, and dispatch_marking and dispatch_marked, before and after
committing marks. A purge has archive_written, before an archived slot is recorded, and archived,
before the messages leave their log.

``SAF_FAILPOINT=mom_commit`` kills the process group there with SIGKILL; ``mom_commit:3`` does so
the third time that the process reaches the point. If unset, a point costs one comparison per chunk.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def die() -> None:
    """Kill this process and its whole process group."""
    os.killpg(0, signal.SIGKILL)


_armed = ""
_left = 0
_action: Callable[[], None] = die


def arm(point: str, action: Callable[[], None] = die) -> None:
    """Set where this process dies: ``NAME`` or ``NAME:TIMES``; an empty text disarms it."""
    global _armed, _left, _action  # noqa: PLW0603 - one per process, as SAF_FAILPOINT promises
    _armed, _, times = point.partition(":")
    _left = int(times or 1)
    _action = action


def fail_point(name: str) -> None:
    """Die here if the process is armed with this point."""
    if name != _armed:
        return
    global _left  # noqa: PLW0603 - counts down per process
    _left -= 1
    if _left == 0:
        _action()


arm(os.environ.get("SAF_FAILPOINT", ""))
