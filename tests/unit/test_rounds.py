"""A command's round of brokers: its exit code says the worst that it met, or what it found."""

from __future__ import annotations

import pytest
import typer

from saf.cli.brokers import Round
from saf.config import Settings
from saf.errors import ConfigurationError, SafError, Unavailable

MENDED, LATER = ConfigurationError("no"), Unavailable("db", "away")


@pytest.mark.parametrize(
    ("failed", "found", "code"),
    [
        ([], 0, 0),
        ([], 1, 1),
        ([MENDED], 0, 2),
        ([LATER], 0, 75),
        ([MENDED, LATER], 0, 75),
        ([LATER, MENDED], 0, 75),
        ([LATER], 1, 1),
    ],
)
def test_what_was_found_comes_before_what_failed(
    failed: list[SafError], found: int, code: int
) -> None:
    done = Round({}, Settings.model_construct())
    done.failed = [(f"app {number}", error) for number, error in enumerate(failed)]
    if code == 0:
        done.finish(say=False, found=found)
        return
    with pytest.raises(typer.Exit) as ended:
        done.finish(say=False, found=found)
    assert ended.value.exit_code == code
