"""Places of log archives: a folder of Parquet, or a table of a kind that supports archives.

/srv/saf-archive                a folder; see `saf.log.archive`
delta:/srv/lake/archive         a table; see `saf.destinations.delta.archive`
delta:s3://bucket/archive
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from saf.database import Dsn
from saf.destinations.kinds import OURS, settings_of
from saf.destinations.settings import DestinationSettings

if TYPE_CHECKING:
    from saf.log.ring import Archive


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
