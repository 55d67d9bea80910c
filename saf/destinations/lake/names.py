"""Names that a table of a lakehouse has besides its columns'."""

from __future__ import annotations

DAY = "day"
"""Column that partitions a Delta table by day: the date of created_at, in UTC."""
DESTINATION = "saf.destination"
"""Table property that contains the table's identity."""
ARCHIVE = "saf.archive"
"""Table property of an archive of logs, which is not a destination."""
