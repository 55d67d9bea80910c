"""A round with streams of a real Spark, whose driver takes minutes on a busy machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.crash.plan import Fault, plan
from tests.crash.rounds import Round
from tests.crash.site import Site
from tests.tiers import sized

pytestmark = pytest.mark.full

SEED = 7


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(sized(1, 2)))
def test_streams_write_each_message_once_although_their_driver_is_killed(number: int) -> None:
    fault = Fault(kind="kill_stream", after=1, lasts=0, target=0)
    made = replace(plan(SEED, number), streams=True, faults=(fault,), writers=2, forwarders=1)
    with Site() as site:
        outcome = Round(site, replace(made, transactions=100, dialogs=False)).run()
    assert outcome.good, outcome
