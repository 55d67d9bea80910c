"""What saf says to who runs it, by structlog.

That is a quarter of what `import saf` would take, so it is imported when there is first something
to say.
"""

from __future__ import annotations

from typing import Any


class Log:
    """A structlog logger by its name: ``log.warning("event", detail=…)`` and so on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, level: str) -> Any:
        import structlog

        return getattr(structlog.get_logger(self._name), level)
