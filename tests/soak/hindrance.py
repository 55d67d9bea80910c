"""A hindrance: in a piece, all programs but the application stand still for a while.

It is as if their machine had slept, and messages pile up. Afterwards the system has to recover:
what has piled up is done, and messages take no longer than before.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.soak.flatness import Sample

HINDERED = "hindered"
"""The figure of a sample that is taken while programs stand still."""
LATENCIES = ("p50/", "p99/")
WINDOW_SECONDS = 60.0
"""What is compared is the median of so long: an endpoint fails now and then."""
MARGIN_MS = 1000.0
"""So much above the longest time before the hindrance is as before."""


def recovery(samples: Sequence[Sample]) -> Mapping[str, float | None]:
    """How long each latency was above what it had been before a hindrance.

    Returns:
        Seconds after the hindrance, by the latency's name; None if it was above to the end.
        Nothing, if there was no hindrance, or nothing after it.

    >>> def took(*ms): return [
    ...     Sample(piece=1, seconds=10.0 * n, figures=figures) for n, figures in enumerate(
    ...     {"hindered": 1.0} if one is None else {"p99/hooks": float(one)} for one in ms)]
    >>> before = (200, 4000, 200, 200, 200, None, None)
    >>> recovery(took(*before, *range(60_000, 0, -6_000), *[300] * 20))
    {'p99/hooks': 100.0}
    >>> recovery(took(*before, *range(60_000, 90_000, 1_000)))
    {'p99/hooks': None}
    >>> recovery(took(200, 300))
    {}
    """
    hindered = [one.seconds for one in samples if HINDERED in one.figures]
    before = [one.figures for one in samples if hindered and one.seconds < hindered[0]]
    after = [one for one in samples if hindered and one.seconds > hindered[-1]]
    if not after:
        return {}
    names = sorted({name for one in before for name in one if name.startswith(LATENCIES)})
    return {
        name: _above(
            [(at.seconds - hindered[-1], at.figures[name]) for at in after if name in at.figures],
            MARGIN_MS + max(one[name] for one in before if name in one),
        )
        for name in names
    }


def _above(points: Sequence[tuple[float, float]], most: float) -> float | None:
    """When the values were above for the last time; None if they are, or if there are none."""
    if not points:
        return None
    ends = points[-1][0]
    windows = [at for at, _ in points if at + WINDOW_SECONDS <= ends] or [points[0][0]]
    late = [
        at
        for at in windows
        if statistics.median(v for other, v in points if at <= other < at + WINDOW_SECONDS) > most
    ]
    if late and late[-1] == windows[-1]:
        return None
    return late[-1] + WINDOW_SECONDS / 2 if late else 0.0


def findings(recovered: Mapping[str, float | None]) -> list[str]:
    """What has not recovered.

    >>> findings({"p50/hooks": 30.0, "p99/hooks": None})
    ['p99/hooks has not recovered from the hindrance']
    """
    return [
        f"{name} has not recovered from the hindrance"
        for name, seconds in recovered.items()
        if seconds is None
    ]
