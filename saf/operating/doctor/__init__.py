"""The doctor: what is wrong, or soon will be, with its cause and its cure.

Each check is a small function that asks one database one question, and yields what it found, if
anything. `examine` makes all checks of every broker and destination. Nothing is written.

    error      a promise does not hold, or messages wait for a person
    warning    it works, but not for long; or it could not be examined
    ok         it was examined, and nothing was found

A check that the role may not make is a warning that says so; one that fails otherwise, such as for
a missing table, is an error that says so. The others go on. A cure acts at the database of its
finding only, except for `saf rebase`, which repairs whatever was set back. PostgreSQL shows the age
of another user's session only to members of pg_read_all_stats. Of a query, only the part before its
first literal is shown.
"""

from saf.operating.doctor.examination import examine
from saf.operating.doctor.patient import REACHABLE, Finding, Limits

__all__ = ["REACHABLE", "Finding", "Limits", "examine"]
