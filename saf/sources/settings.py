"""Settings of a source: a table ``[sources.NAME]`` of saf.toml, with a class per kind.

    [sources.payments]
    kind = "redis"
    server = "redis://redis.example.com:6379/0"
    topic = "payments"
    service = "billing"          # whose messages they become
    into = "mom"                 # the destination with the inbox; default: the only one

Each kind has a class derived from `SourceSettings`, in a module that is quick to import.
`saf.sources.kinds` finds the class by the kind's name. Modules that need Arrow or a client are
imported where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, ConfigDict

from saf.destinations.settings import BoundedSettings, refuse_shown_secrets, unusable, within
from saf.message import MAX_NAME, fits

if TYPE_CHECKING:
    from saf.sources import Source

Start = Literal["earliest", "latest"]
"""Where to begin in a topic that was not read before."""


def _name(text: str) -> str:
    if not text or not fits(text, MAX_NAME) or not text.isprintable():
        raise ValueError(f"a name has 1 to {MAX_NAME} bytes of printable characters")
    return text


@dataclass(frozen=True, kw_only=True)
class WindowBounds:
    """Limits of a window of ids; see `saf.sources.window`."""

    messages: int
    """Messages whose ids are kept; 0: none."""
    seconds: float
    """Time to keep them."""


class SourceSettings(BoundedSettings):
    """Address of a topic, and what its messages become."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    reads: ClassVar[tuple[str, str]]
    """Module of the kind's folder, and its class of the source."""
    client: ClassVar[str | None] = None
    """Extra with the client; None if saf needs no client."""

    kind: str
    """Kind of source; see `saf.sources.kinds`."""
    topic: Annotated[str, AfterValidator(_name)]
    """Topic to read."""
    service: Annotated[str, AfterValidator(_name)]
    """Service that the messages are addressed to."""
    into: str | None = None
    """Name of the destination whose inbox stores them. Default: the only destination with one."""
    named_services: bool = False
    """True: a message that saf wrote goes to the service that its headers name, and all others to
    `service`."""
    key_header: str | None = None
    """Header whose value becomes the key of a message that saf did not write. Default: the record's
    own key, if it has one."""
    start: Start = "earliest"
    """Where to begin in a topic that was not read before."""
    chunk_rows: Annotated[int, within(1, 1_000_000)] = 10_000
    """Messages to read at a time, and to store in one transaction."""

    @property
    def window(self) -> WindowBounds | None:
        """Bounds of the window of ids; None for a topic with places."""
        return None

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the settings of these names that have a value."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Reject a field that may show a secret."""
        refuse_shown_secrets(cls)

    def open(self, name: str) -> Source:
        """Return the source, not connected yet.

        Raises:
            Refused: the kind's client is not installed here.
        """
        module, source = self.reads
        try:
            found = import_module(f"{type(self).__module__}.{module}")
        except ImportError as error:
            if self.client is None:
                raise
            raise unusable(
                f"source {name!r}",
                f"its client is not installed here ({error})",
                f"install it: pip install 'saf-outbox[{self.client}]'",
            ) from None
        return cast("Source", getattr(found, source)(name, self))
