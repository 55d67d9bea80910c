"""Shrinking: a plan with a finding, reduced to the fewest faults, people and messages that show it.

No plan runs the same way twice. So a smaller plan is run several times, and it counts if one of
them has a finding of the same name. What comes out is printed as a test.
"""

from __future__ import annotations

import pprint
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.crash.plan import Plan
from tests.crash.rounds import Round
from tests.crash.site import Site

TRIES = 4
MOST_TRANSACTIONS = 64
"""From how many on it looks for fewer; before, there is no limit."""

PLAIN = {
    "destinations": 1,
    "poison": 0.0,
    "mortal": 0.0,
    "purge": False,
    "skewed": False,
    "hubs": 0,
    "dialogs": False,
    "consumers": False,
    "hostile": False,
    "pooled": False,
    "visited": False,
    "streams": False,
    "transforms": (),
}
"""The simplest value of what a plan has or has not. Hubs need dialogs, so they go first."""

TEST = '''\
def test_a_round_has_no_findings() -> None:
    """It had: {findings}."""
    with SITES[{site!r}]() as site:
        outcome = Round(site, PLAN).run()
    assert outcome.good, outcome


PLAN = (
{plan}
)
'''


def shrink(plan: Plan, shows: Callable[[Plan], bool]) -> Plan:
    """The smallest plan that shows it still; no step makes it smaller.

    >>> from tests.crash.plan import plan
    >>> small = shrink(plan(7, 0), lambda one: one.writers > 1 and len(one.faults) > 0)
    >>> (small.writers, small.forwarders, len(small.faults), small.transactions)
    (2, 1, 1, 1)
    """
    known: dict[Plan, bool] = {}

    def asked(one: Plan) -> bool:
        if one not in known:
            known[one] = shows(one)
        return known[one]

    smaller: Plan | None = plan
    while smaller:
        plan, smaller = smaller, next(filter(asked, _smaller(smaller)), None)
    return plan


def shows_again(site: Site, names: set[str], bug: str = "") -> Callable[[Plan], bool]:
    """Whether a plan has one of these findings, in one of some rounds."""

    def shows(plan: Plan) -> bool:
        found = any(Round(site, plan, bug=bug).run().findings & names for _ in range(TRIES))
        print(f"  {'shown' if found else 'not shown'} by {in_short(plan)}", flush=True)
        return found

    return shows


def as_test(plan: Plan, findings: set[str], site: str) -> str:
    """A test, for tests/crash/test_crash.py."""
    literal = textwrap.indent(pprint.pformat(plan, width=96), "    ")
    return TEST.format(findings=", ".join(sorted(findings)), site=site, plan=literal)


def in_short(plan: Plan) -> str:
    """A plan in a line."""
    more = [name for name, plain in PLAIN.items() if getattr(plan, name) != plain]
    faults = " ".join(fault.kind for fault in plan.faults) or "no faults"
    limit = "" if plan.transactions is None else f" of {plan.transactions} transactions"
    people = f"{plan.writers} writers{limit}, {plan.forwarders} forwarders"
    return f"{people}, {faults}{'; ' if more else ''}{' '.join(more)}"


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that have less; those with much less first."""
    faults = plan.faults
    size = len(faults)
    while size:
        for first in range(0, len(faults), size):
            yield replace(plan, faults=faults[:first] + faults[first + size :])
        size //= 2
    plain = {name: value for name, value in PLAIN.items() if getattr(plan, name) != value}
    if len(plain) > 1:
        yield replace(plan, **plain)  # type: ignore[arg-type] # each of its own type
    for name, value in plain.items():
        if name != "dialogs" or not plan.hubs:
            yield replace(plan, **{name: value})  # type: ignore[arg-type]
    for people in ("writers", "forwarders"):
        there = getattr(plan, people)
        for fewer in sorted({1, there - 1} - {0, there}):
            yield replace(plan, **{people: fewer})
    most = plan.transactions or 2 * MOST_TRANSACTIONS
    if most > 1:
        yield replace(plan, transactions=most // 2)
