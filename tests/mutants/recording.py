"""Recordings: which lines of saf each test executes, and how long it takes.

    build/mutants-recorded/
        1f…e0.coverage     lines by test, of some files of tests; data of the package coverage
        1f…e0.json         these files, what they and saf were then, and the seconds of each test
        sources/           files of saf as they were, by their hash

Tests are recorded a few files at a time, so an interrupted recording continues where it stopped. A
changed file of tests is recorded again. A change of saf leaves recordings valid: a line is found by
its former number. What a process of a test executes counts as the test's, unless it is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutants.mutant import ROOT
from tests.mutants.planting import ONE_VERSION, Field

FOLDER = Path("build/mutants-recorded")
AT_ONCE = 6
"""How many files of tests one run of pytest records."""
LEFT_OUT = ("mutants", "soak", "fuzz", "spark", "stateful", "crash")
"""Folders of tests that take long, or are about the tests."""
KEPT_FILES = 30
"""How many files of saf a recording keeps in memory; one may take some MB."""
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
        """Return the files of tests that are not recorded and whose path contains a word."""
        files = sorted(
            str(file.relative_to(self.root))
            for file in self.root.glob("tests/*/test_*.py")
            if file.parent.name not in LEFT_OUT
        )
        wanted = [file for file in files if not words or any(word in file for word in words)]
        return [file for file in wanted if file not in self._of_files]

    def record(self, ground: Field, files: Sequence[str]) -> None:
        """Run tests in the copy, and keep which lines they execute."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = Path(tempfile.mkdtemp(dir=self.folder.absolute()))
        recorder = ground.tree.joinpath(*RECORDER)
        more = {
            "PYTHONPATH": f"{recorder}{os.pathsep}{ground.environment['PYTHONPATH']}",
            "SAF_RECORDED": str(data / "data"),
            "SAF_RECORDED_SOURCE": str(ground.tree / "saf"),
        }
        options = ("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", PLUGIN)
        ran = ground.run(
            [sys.executable, "-m", "pytest", *options, *ONE_VERSION, *files],
            ground.tree,
            more,
            seconds=None,
        )
        if not (data / "data.seconds").exists():
            raise RuntimeError(f"nothing was recorded of {', '.join(files)}: {ran.stdout[-2000:]}")
        known = {
            "files": {file: _hash((ground.tree / file).read_bytes()) for file in files},
            "sources": dict(self._sources(ground.tree)),
            "tree": str(ground.tree),
            "seconds": json.loads((data / "data.seconds").read_text()),
        }
        name = _hash(json.dumps([known["files"], time.time()]).encode())
        _join(data, self.folder / f"{name}.coverage")
        (self.folder / f"{name}.json").write_text(json.dumps(known))
        shutil.rmtree(data)
        self._add(Recording(self.folder, name, self.root))

    def _sources(self, tree: Path) -> Iterator[tuple[str, str]]:
        """Keep the files of saf; give the name and the hash of each."""
        sources = self.folder / "sources"
        sources.mkdir(exist_ok=True)
        for file in sorted(tree.glob("saf/**/*.py")):
            text = file.read_bytes()
            (sources / _hash(text)).write_bytes(text)
            yield str(file.relative_to(tree)), _hash(text)

    def tests_of(self, file: str, lines: Iterable[int]) -> dict[str, float]:
        """Return the tests that execute any of some lines of a file, with their seconds."""
        numbers = frozenset(lines)
        return {
            test: seconds
            for name, recording in self._of_files.items()
            for test, seconds in recording.tests_of(file, numbers).items()
            if test.partition("::")[0] == name
        }


class Recording:
    """One run of some files of tests."""

    def __init__(self, folder: Path, name: str, root: Path) -> None:
        known = json.loads((folder / f"{name}.json").read_text())
        self.files: Mapping[str, str] = known["files"]
        self._folder, self._name, self._root = folder, name, root
        self._sources: Mapping[str, str] = known["sources"]
        self._tree = known["tree"]
        self._seconds: Mapping[str, float] = known["seconds"]
        self._tests: OrderedDict[str, dict[int, list[str]]] = OrderedDict()
        """The tests by line, of the files that were asked for last."""

    @cached_property
    def _data(self) -> Any:
        from coverage import CoverageData

        data = CoverageData(str(self._folder / f"{self._name}.coverage"))
        data.read()
        return data

    def tests_of(self, file: str, lines: frozenset[int]) -> dict[str, float]:
        """Return the tests that execute any of some lines of a file as it is now."""
        if file not in self._sources:
            return {}
        then = (self._folder / "sources" / self._sources[file]).read_text()
        before = _lines_before(then, (self._root / file).read_text())
        by_line = self._by_line(file)
        tests = {test for line in lines if line in before for test in by_line.get(before[line], ())}
        return {test: self._seconds[test] for test in tests if test in self._seconds}

    def _by_line(self, file: str) -> dict[int, list[str]]:
        if file not in self._tests:
            self._tests[file] = self._data.contexts_by_lineno(f"{self._tree}/{file}")
        self._tests.move_to_end(file)
        while len(self._tests) > KEPT_FILES:
            self._tests.popitem(last=False)
        return self._tests[file]


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
