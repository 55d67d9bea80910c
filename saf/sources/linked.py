"""What the kinds share whose topics have one partition, read by one connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Generic, Protocol, TypeVar

from saf.errors import Unavailable


class Link(Protocol):
    """A connection to a broker."""

    def close(self) -> None:
        """Close the connection."""


L = TypeVar("L", bound=Link)


class Linked(ABC, Generic[L]):
    """A `saf.sources.Source` with one partition, which connects when it has to."""

    loses: ClassVar[type[BaseException]] = Unavailable
    """Error after which the connection is not used again."""

    def __init__(self, name: str) -> None:
        self.what = f"source {name!r}"
        self._link: L | None = None

    @abstractmethod
    def _open(self) -> L:
        """Return a new connection."""

    @abstractmethod
    def _errors(self) -> AbstractContextManager[None]:
        """Translate the client's errors."""

    def connect(self) -> None:
        """Connect, if not connected yet."""
        if self._link is None:
            with self._errors():
                self._link = self._open()

    def partitions(self) -> int:
        """Return 1."""
        return 1

    def close(self) -> None:
        """Close the connection."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    @contextmanager
    def _connected(self) -> Iterator[L]:
        self.connect()
        assert self._link is not None  # noqa: S101 - connected
        try:
            with self._errors():
                yield self._link
        except self.loses:
            self.close()
            raise
