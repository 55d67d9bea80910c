"""The death of a process at a fail point, for tests that go on in this one."""

from __future__ import annotations


class Crash(BaseException):
    """The process dies here; what it had in memory is gone."""


def crash() -> None:
    raise Crash
