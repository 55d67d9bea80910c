"""A plugin of pytest that says which test what is executed belongs to, and how long each took."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

from tests.mutants.recorder.sitecustomize import AT, DATA

_seconds: dict[str, float] = {}
_failed: set[str] = set()


def pytest_configure() -> None:
    os.environ[AT] = tempfile.mkstemp(dir=Path(os.environ[DATA]).parent)[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _at(item.nodeid)
    try:
        return (yield)
    finally:
        _at("")


def _at(test: str) -> None:
    Path(os.environ[AT]).write_text(test)
    recording = coverage.Coverage.current()
    assert recording is not None
    recording.switch_context(test)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    passed = {test: took for test, took in _seconds.items() if test not in _failed}
    Path(f"{os.environ[DATA]}.seconds").write_text(json.dumps(passed))
