"""Retries while a service does not answer: the only module that uses tenacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from saf.errors import Refused, Unavailable

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 2.0


def while_unavailable(attempts: int, action: Callable[[], T]) -> T:
    """Call ``action`` up to ``attempts`` times while it raises `Unavailable`; return its result.

    This bridges outages of a few seconds, such as a server's restart. A server that hangs is not
    retried, because the first call has already waited for it. The last error is raised unchanged.
    """
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential(FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
        retry=tenacity.retry_if_exception(_passing),
        reraise=True,
    )(action)


def _passing(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and not (error.hangs or isinstance(error, Refused))
