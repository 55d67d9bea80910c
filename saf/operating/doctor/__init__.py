"""The doctor: problems, present or coming, with their causes and cures.

Each check is a small function that runs one query at one database, and yields its findings, if any.
`examine` runs all checks for every broker and destination. Nothing is written.

    error      a promise is broken, or messages wait for an operator
    warning    it works, but not for long; or the check could not run
    ok         examined without findings

A check that the role may not run is reported as a warning; one that fails otherwise, e.g. because a
table is missing, as an error. The other checks continue. A cure acts only at the database of its
finding, except for `saf rebase`, which repairs everything that was set back.
PostgreSQL shows the age of another user's session only to members of pg_read_all_stats. Of a query,
only the part before its first literal is shown.
"""

from saf.operating.doctor.examination import examine
from saf.operating.doctor.patient import REACHABLE, Finding, Limits

__all__ = ["REACHABLE", "Finding", "Limits", "examine"]
