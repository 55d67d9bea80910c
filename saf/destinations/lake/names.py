"""Names that a table of a lakehouse has besides those of its columns."""

from __future__ import annotations

DAY = "day"
"""The column by which a Delta table is partitioned by day: the date of created_at, in UTC."""
DESTINATION = "saf.destination"
"""The property of a table that has its identity."""
ARCHIVE = "saf.archive"
"""The property that a table has if it is an archive of logs, and no destination."""
