"""The record of a soak: its samples and its pieces, as JSON lines in its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.soak.flatness import HOUR, Sample
from tests.soak.piece import Piece


class Record:
    """What has come out so far."""

    def __init__(self, folder: Path) -> None:
        self._samples, self._pieces = folder / "samples.jsonl", folder / "pieces.jsonl"

    def note(self, sample: Sample) -> None:
        """Write a sample down."""
        _append(self._samples, asdict(sample))

    def ended(self, piece: Piece) -> None:
        """Write down what a piece has come to."""
        _append(self._pieces, asdict(piece))

    def pieces(self) -> list[Piece]:
        """All pieces that have come to their end."""
        return [Piece(**one) for one in _lines(self._pieces)]

    def samples(self) -> list[Sample]:
        """The samples of these pieces."""
        known = {one.number for one in self.pieces()}
        return [Sample(**one) for one in _lines(self._samples) if one["piece"] in known]

    def begin(self) -> int:
        """Return the number of the next piece; one that was killed has had its own."""
        _cut(self._samples)
        numbers = [one["piece"] for one in _lines(self._samples)]
        return max([*numbers, *(one.number for one in self.pieces())], default=0) + 1

    @property
    def hours(self) -> float:
        """How long all pieces that have come to their end were at their rate."""
        return sum(one.seconds for one in self.pieces()) / HOUR


def _append(file: Path, said: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(said) + "\n")


def _cut(file: Path) -> None:
    """Remove a last line that is not whole."""
    if file.exists() and not (whole := file.read_bytes()).endswith(b"\n"):
        os.truncate(file, whole.rfind(b"\n") + 1)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; the last one may be cut off, if its writer was killed."""
    whole = file.read_text(encoding="utf-8") if file.exists() else ""
    lines: Iterable[str] = whole.split("\n")[:-1]
    yield from map(json.loads, lines)
