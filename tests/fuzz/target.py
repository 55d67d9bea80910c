"""What reads foreign bytes, with what it is given and what it may do.

A target's check returns, whatever it is given: what its reader refuses by an error that its
docstring names, it lets pass, and everything else that it raises is a finding.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader of foreign bytes."""

    name: str
    given: st.SearchStrategy[Any]
    check: Callable[[Any], object]
    found: tuple[Any, ...] = ()
    """What was a finding once, and is tried each time."""

    def test(self) -> Any:
        """The check as a test of Hypothesis."""

        @given(self.given)
        def test(one: Any) -> None:
            self.check(one)

        return functools.reduce(lambda made, one: example(one)(made), self.found, test)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\0", "\ud800", "1e999", 10**400, -(2**63) - 1, "2026-01-01T00:00:00Z", ""])
)


def values(names: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Values of JSON whose objects have such names."""
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
        max_leaves=12,
    )


deep = st.builds(
    lambda depth, pair, inner: pair[0] * depth + inner + pair[1] * depth,
    st.sampled_from([10, 200, 2_500]),
    st.sampled_from([("[", "]"), ('{"a":', "}"), ("[", "")]),
    st.sampled_from(["", "1", "9" * 5000]),
)
"""Texts that are nested more deeply than Python counts, or nearly so."""


def documents(*names: str) -> st.SearchStrategy[str]:
    """Texts that are JSON, or nearly so; objects have these names more often than others."""
    some = values(st.sampled_from(names) | st.text(max_size=8) if names else st.text(max_size=8))
    whole = st.dictionaries(st.sampled_from(names), some) if names else some
    return st.one_of(some.map(json.dumps), whole.map(json.dumps), deep, st.text())


def encoded(texts: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    """Texts as bytes, and bytes that are no text."""
    return texts.map(lambda text: text.encode(errors="surrogatepass")) | st.binary()


def nearly(valid: bytes) -> st.SearchStrategy[bytes]:
    """Something valid in which a few pieces were replaced, cut out or doubled."""
    places = st.integers(0, len(valid))

    def damaged(splices: list[tuple[int, int, bytes]]) -> bytes:
        body = valid
        for at, length, piece in splices:
            body = body[:at] + piece + body[at + length :]
        return body

    pieces = st.binary(max_size=6) | st.builds(lambda at, end: valid[at:end], places, places)
    return st.lists(st.tuples(places, st.integers(0, 12), pieces), max_size=4).map(damaged)
