"""Recordings: which lines of saf each test executes, and how long it takes.

    build/mutants-recorded/
        1f…e0.coverage     lines by test, of some files of tests; data of the package coverage
        1f…e0.json         these files, what they and saf were then, and the seconds of each test
        sources/           files of saf as they were, by their hash

Tests are recorded a few files at a time, so that a long recording goes on where it was interrupted.
A file of tests is recorded again when it changes. When saf changes, its recordings stay: a line is
looked for where it was. Processes that a test starts count as the test, unless they are killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutants.mutant import ROOT
from tests.mutants.planting import Field

FOLDER = Path("build/mutants-recorded")
AT_ONCE = 6
"""How many files of tests one run of pytest records."""
LEFT_OUT = ("mutants", "soak", "fuzz", "spark", "stateful", "crash")
"""Folders of tests that take long, or are about the tests."""
RECORDER = ("tests", "mutants", "recorder")
PLUGIN = "tests.mutants.recorder.at_test"


class Recordings:
    """What has been recorded of tests as they are now."""

    def __init__(self, folder: Path = FOLDER, root: Path = ROOT) -> None:
        self.folder, self.root = folder, root
        self._of_files: dict[str, Recording] = {}
        for file in sorted(folder.glob("*.json")):
            self._add(Recording(folder, file.stem, root))

    def _add(self, recording: Recording) -> None:
        for name, of in recording.files.items():
            file = self.root / name
            if file.is_file() and _hash(file.read_bytes()) == of:
                self._of_files[name] = recording

    def missing(self, words: Sequence[str] = ()) -> list[str]:
        """The files of tests that are not recorded, of those whose path has one of some words."""
        files = sorted(
            str(file.relative_to(self.root))
            for file in self.root.glob("tests/*/test_*.py")
            if file.parent.name not in LEFT_OUT
        )
        wanted = [one for one in files if not words or any(word in one for word in words)]
        return [one for one in wanted if one not in self._of_files]

    def record(self, ground: Field, files: Sequence[str]) -> None:
        """Run tests in the copy, and keep which lines they execute."""
        data = self.folder.absolute() / "run"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(parents=True)
        recorder = ground.tree.joinpath(*RECORDER)
        more = {
            "PYTHONPATH": f"{recorder}{os.pathsep}{ground.environment['PYTHONPATH']}",
            "SAF_RECORDED": str(data / "data"),
            "SAF_RECORDED_SOURCE": str(ground.tree / "saf"),
        }
        options = ("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", PLUGIN)
        ran = ground.run(
            [sys.executable, "-m", "pytest", *options, "--one-postgresql", *files],
            ground.tree,
            more,
            seconds=None,
        )
        if not (data / "data.seconds").exists():
            raise RuntimeError(f"nothing was recorded of {', '.join(files)}: {ran.stdout[-2000:]}")
        seconds = json.loads((data / "data.seconds").read_text())
        here = {name: _hash((self.root / name).read_bytes()) for name in files}
        name = _hash(json.dumps([here, time.time()]).encode())[:16]
        _join(data, self.folder / f"{name}.coverage")
        known = {
            "files": here,
            "sources": dict(self._sources()),
            "tree": str(ground.tree),
            "seconds": seconds,
        }
        (self.folder / f"{name}.json").write_text(json.dumps(known))
        shutil.rmtree(data)
        self._add(Recording(self.folder, name, self.root))

    def _sources(self) -> Iterator[tuple[str, str]]:
        sources = self.folder / "sources"
        sources.mkdir(exist_ok=True)
        for file in sorted(self.root.glob("saf/**/*.py")):
            whole = file.read_bytes()
            (sources / _hash(whole)).write_bytes(whole)
            yield str(file.relative_to(self.root)), _hash(whole)

    def tests_of(self, file: str, lines: Iterable[int]) -> dict[str, float]:
        """The tests that execute one of some lines of a file of saf, with their seconds."""
        found: dict[str, float] = {}
        for name, recording in self._of_files.items():
            found |= {
                test: seconds
                for test, seconds in recording.tests_of(file, frozenset(lines)).items()
                if test.partition("::")[0] == name
            }
        return found


class Recording:
    """One run of some files of tests."""

    def __init__(self, folder: Path, name: str, root: Path) -> None:
        known = json.loads((folder / f"{name}.json").read_text())
        self.files: Mapping[str, str] = known["files"]
        self._folder, self._name, self._root = folder, name, root
        self._sources: Mapping[str, str] = known["sources"]
        self._tree = known["tree"]
        self._seconds: Mapping[str, float] = known["seconds"]
        self._tests: tuple[str, dict[int, list[str]]] = "", {}
        """Of the file that was asked for last, the tests by line."""

    @cached_property
    def _data(self) -> Any:
        from coverage import CoverageData

        data = CoverageData(str(self._folder / f"{self._name}.coverage"))
        data.read()
        return data

    def tests_of(self, file: str, lines: frozenset[int]) -> dict[str, float]:
        """The tests that execute one of some lines of a file as it is now."""
        if file not in self._sources:
            return {}
        if self._tests[0] != file:
            self._tests = file, self._data.contexts_by_lineno(f"{self._tree}/{file}")
        then = (self._folder / "sources" / self._sources[file]).read_text()
        before = _lines_before(then, (self._root / file).read_text())
        tests = {
            test
            for line in lines
            if line in before
            for test in self._tests[1].get(before[line], ())
        }
        return {test: self._seconds[test] for test in tests if test in self._seconds}


def _join(data: Path, into: Path) -> None:
    """Make one file of the data that processes have left, but for what no test has executed."""
    from coverage import CoverageData

    whole = CoverageData(str(into))
    for file in sorted(data.glob("data.*")):
        if file.name != "data.seconds" and file.stat().st_size:
            part = CoverageData(str(file))
            part.read()
            whole.update(part)
    whole.write()
    whole.close()


@lru_cache(maxsize=512)
def _lines_before(then: str, now: str) -> dict[int, int]:
    """For each line of a text that was there before, its number then.

    >>> _lines_before("a\\nb\\nc\\n", "a\\nx\\nb\\nc\\n")
    {1: 1, 3: 2, 4: 3}
    """
    old, new = then.splitlines(), now.splitlines()
    if old == new:
        return {number: number for number in range(1, len(new) + 1)}
    same = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {b + n + 1: a + n + 1 for a, b, size in same for n in range(size)}


def _hash(content: bytes) -> str:
    return sha256(content).hexdigest()[:24]


def in_groups(files: Sequence[str]) -> list[list[str]]:
    """Files of tests that are recorded together: a few of one folder."""
    folders: dict[str, list[str]] = defaultdict(list)
    for file in files:
        folders[file.rpartition("/")[0]].append(file)
    return [
        names[first : first + AT_ONCE]
        for names in folders.values()
        for first in range(0, len(names), AT_ONCE)
    ]
