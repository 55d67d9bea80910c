"""Kinds: a destination's ``kind`` names the class of its settings.

A kind is a class of settings (`saf.destinations.settings.DestinationSettings`), which a package
declares as an entry point of the group ``saf.destinations``:

    [project.entry-points."saf.destinations"]
    paper = "our_package.paper:Paper"

saf imports a kind only when a saf.toml uses it, so the client of an unused kind may be missing.
saf's own kinds are declared in the same way, but are also listed here, so that they are found where
only saf's modules exist, such as on executors. Other packages cannot take their names.

An archive of a log is a folder of Parquet, or a table of a kind that supports archives:

    /srv/saf-archive                a folder; see `saf.log.archive`
    delta:/srv/lake/archive         a table; see `saf.destinations.delta.archive`
    delta:s3://bucket/archive
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, SerializeAsAny

from saf.destinations.settings import DestinationSettings

if TYPE_CHECKING:
    from saf.database import Dsn
    from saf.log.ring import Archive

S = TypeVar("S")

GROUP = "saf.destinations"
DEFAULT = "postgresql"
OURS = {
    "postgresql": "saf.destinations.postgresql:Postgresql",
    "https": "saf.destinations.https:Https",
    "delta": "saf.destinations.delta:Delta",
    "iceberg": "saf.destinations.iceberg:Iceberg",
    "jsonl": "saf.destinations.jsonl:Jsonl",
    "kafka": "saf.destinations.kafka:Kafka",
    "nats": "saf.destinations.nats:Nats",
    "rabbitmq": "saf.destinations.rabbitmq:Rabbitmq",
    "rabbitmq_stream": "saf.destinations.rabbitmq_stream:RabbitmqStream",
    "redis": "saf.destinations.redis:Redis",
}


class Kinds(Generic[S]):
    """Kinds of one group of entry points: saf's own, and those of other packages.

    Args:
        group: the group of entry points.
        ours: saf's own kinds, each as ``module:class``.
        base: the class that the settings of each kind derive from.
        called: the words for a kind in errors.
    """

    def __init__(
        self, group: str, ours: Mapping[str, str], base: type[S], called: str = "kind"
    ) -> None:
        self._group = group
        self._ours = ours
        self._base = base
        self._called = called

    def known(self) -> list[str]:
        """Return the names of all kinds."""
        declared = entry_points(group=self._group)
        return sorted({*self._ours, *(one.name for one in declared)})

    def settings_of(self, kind: str) -> type[S]:
        """Return the class of settings of a kind.

        Raises:
            ValueError: the kind does not exist, or its package cannot be imported.
        """
        cls: Any
        if kind in self._ours:
            module, _, name = self._ours[kind].partition(":")
            cls = getattr(import_module(module), name)
        else:
            declared = next(iter(entry_points(group=self._group, name=kind)), None)
            if declared is None:
                raise ValueError(
                    f"unknown {self._called} {kind!r}, only {', '.join(self.known())}; is its "
                    "package installed?"
                )
            cls = _imported(declared)
        if not (isinstance(cls, type) and issubclass(cls, self._base)):
            raise ValueError(  # noqa: TRY004 - a setting is at fault, for pydantic
                f"kind {kind!r} is {cls!r}, which is not a class of settings: its package is at "
                "fault"
            )
        return cls


KINDS = Kinds(GROUP, OURS, DestinationSettings)
known = KINDS.known


def settings_of(kind: str) -> type[DestinationSettings]:
    """Return the class of settings of a kind.

    Raises:
        ValueError: the kind does not exist, or its package cannot be imported, or is incomplete.
    """
    cls = KINDS.settings_of(kind)
    if cls.open is DestinationSettings.open and not hasattr(cls, "stores"):
        raise ValueError(f"kind {kind!r} has neither `open` nor `stores`: its package is at fault")
    return cls


def _imported(declared: EntryPoint) -> object:
    try:
        return declared.load()
    except Exception as error:
        package = declared.dist.name if declared.dist else declared.module
        reason = " ".join(str(error).split()) or "no more is known"
        raise ValueError(
            f"kind {declared.name!r} is of the package {package}, which cannot be imported: "
            f"{type(error).__name__}: {reason}"
        ) from None


def _of_its_kind(table: object) -> object:
    """Validate a table of saf.toml as the settings of its kind."""
    if not isinstance(table, dict):
        return table
    kind = table.get("kind", DEFAULT)
    if not isinstance(kind, str):
        raise ValueError(f"a kind is a text, one of {', '.join(known())}")  # noqa: TRY004 - pydantic's
    return settings_of(kind).model_validate(table)


AnyDestination = Annotated[SerializeAsAny[DestinationSettings], BeforeValidator(_of_its_kind)]
"""Settings of any kind; ``kind`` selects the class."""


def table_at(place: str) -> DestinationSettings | None:
    """Return the settings of an archive that is a table; None if the archive is a folder.

    Raises:
        ValueError: the place is neither.
    """
    kind, _, address = place.partition(":")
    if kind in OURS and address:
        return settings_of(kind).at(address)
    if not place or "://" in place:
        raise ValueError(
            f"{place!r} is neither a folder nor a table such as delta:s3://bucket/archive"
        )
    return None


def archive_at(place: str, dsn: Dsn) -> Archive:
    """Return the archive that stores slots of a broker's logs at ``place``.

    Raises:
        MissingExtra: a package is not installed.
    """
    table = table_at(place)
    if table is not None:
        return table.bounded(dsn.bounds).archive(dsn)
    from saf.log.archive import ParquetArchive

    return ParquetArchive(dsn, Path(place))
