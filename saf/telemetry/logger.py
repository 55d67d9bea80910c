"""Log messages for operators, written with structlog.

Importing structlog takes a quarter of the time of `import saf`, so it is imported only when there
is something to log.
"""

from __future__ import annotations

from typing import Any


class Log:
    """A structlog logger of a given name: ``log.warning("event", detail=…)`` and so on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, level: str) -> Any:
        import structlog

        return getattr(structlog.get_logger(self._name), level)
