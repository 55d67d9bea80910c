"""How much a test does in the gate, and how much in its long form (``make long``).

A promise about many or about long is broken at a tenth already: what it would take to break it
only at the full size is for the long form to find. So is what the gate proves already, in one more
variant: on another PostgreSQL than the oldest and the newest (or than the newest, where that is
slow), in the other format of a destination, by a second run of a whole demo. Such tests have the
mark ``long``.
"""

from __future__ import annotations

import os

LONG = os.environ.get("SAF_TESTS_LONG", "") not in ("", "0")


def sized(gate: int, long: int) -> int:
    """The first in the gate, the second in the long form."""
    return long if LONG else gate
