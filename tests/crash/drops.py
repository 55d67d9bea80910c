"""The checker of drops: plain SQL on what receivers have counted, and nothing of the library.

What is dropped is missed by nobody, so each count of saf.dropped needs something that has happened:

- A service of talks gets a message again where a route is at least once, and drops it. So it drops
  no more repeats than its inbox has.
- A talk that was ended in order ends at both sides, and the first side drops the End of the other.
- After a set-back an end may hear anything again, or too late: repeats, and what was said before an
  Error or after an end.
- Nobody else drops anything; and nothing in a talk expires, or has fragments.

What transforms leave out is no receiver's: `tests.crash.transforms` counts it.
"""

from __future__ import annotations

from collections.abc import Iterable

import psycopg

from tests.crash.checker import Verdict
from tests.crash.past import Past
from tests.crash.talks import COUNTER, DESK, STOCK

COUNTED = """
SELECT s.service, d.reason, sum(d.messages)::bigint
FROM saf.dropped d JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2 ORDER BY 1, 2
"""
REPEATED = """
SELECT to_service, count(*) - count(DISTINCT (conversation_id, from_initiator, sequence))
FROM saf.inbox WHERE from_initiator IS NOT NULL AND sequence IS NOT NULL GROUP BY 1
"""
ENDED = "SELECT count(*) FROM talk WHERE ended"
OF_TALKS = (DESK, STOCK, COUNTER)
ENDS = {STOCK: 1, COUNTER: 2}
"""How many Ends of each talk a service may get when it has ended: a hub has an end either way."""
AFTER_A_SET_BACK = ("repeat", "ended", "overtaken", "outdated")


def look(
    source: str,
    others: Iterable[str],
    verdict: Verdict,
    *,
    talks: bool,
    transforms: bool = False,
    past: Past | None = None,
) -> None:
    """Add what was dropped without a reason, at a source and at other brokers."""
    went_back, ended = past is not None and past.went_back, 0
    if talks:
        with psycopg.connect(source) as connection:
            ((ended,),) = connection.execute(ENDED).fetchall()
    for place in (source, *others):
        with psycopg.connect(place) as connection:
            counted = connection.execute(COUNTED).fetchall()
            repeated: dict[str, int] = dict(connection.execute(REPEATED).fetchall())
        for service, reason, count in counted:
            most = {"repeat": repeated.get(service, 0), "ended": ended * ENDS.get(service, 0)}
            if transforms and place == source and (service, reason) == (None, "left_out"):
                continue
            explained = count <= most.get(reason, 0) or (went_back and reason in AFTER_A_SET_BACK)
            if not (talks and service in OF_TALKS and explained):
                verdict.dropped_wrongly.append((place, service, reason, count))
