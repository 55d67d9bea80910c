"""The doctor: what is wrong, or soon will be, with its cause and its cure.

Each check is a small function that asks one question of one database and yields what it found, if
it found anything. `examine` asks all of them of every broker and destination. Nothing is written.

    error      a promise does not hold, or messages wait for a person
    warning    works, and will not for long; or could not be looked at
    ok         asked, and nothing found

A check that the role may not make is a warning that says so, and the others go on. Another
user's session shows its age only to a member of pg_read_all_stats. Of a query, no more is shown
than what comes before its first literal.
"""

from saf.operating.doctor.examination import examine
from saf.operating.doctor.patient import REACHABLE, Finding, Limits

__all__ = ["REACHABLE", "Finding", "Limits", "examine"]
