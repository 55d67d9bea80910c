"""What reads foreign bytes returns, or refuses them by an error that its docstring names."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from tests.fuzz.listed import TARGETS
from tests.fuzz.target import Target
from tests.tiers import sized

EXAMPLES = sized(50, 20_000)


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_it_is_given_it_returns_or_says_why_not(name: str) -> None:
    settings(max_examples=EXAMPLES, deadline=None)(TARGETS[name].test())()


def test_a_reader_that_raises_something_else_is_found() -> None:
    def careless(text: str) -> None:
        if text.startswith("{"):
            raise KeyError(text)

    target = Target(name="careless", given=st.text(), check=careless)
    with pytest.raises(KeyError):
        settings(max_examples=5_000, deadline=None, database=None)(target.test())()
