"""Where a page of lanes may begin."""

from __future__ import annotations

import json

import pytest

from saf.errors import UsageError
from saf.setaside.waiting import place_at


def place(attempts: int) -> str:
    number = "00000000-0000-0000-0000-000000000000"
    return json.dumps(["false", "s", "true", str(-attempts), "mom", "service", "billing", number])


def test_a_place_has_a_number_of_attempts_that_a_database_can_count() -> None:
    for attempts in (0, 1 << 31):
        assert place_at(place(attempts)) is not None
    for attempts in (-1, (1 << 31) + 1):
        with pytest.raises(UsageError, match="no page of lanes ends at"):
            place_at(place(attempts))
