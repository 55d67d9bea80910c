"""Records which lines of saf each test executes, in whatever process it does so.

Python imports this by itself at its start, where the folder is in PYTHONPATH. pytest's process
notes in a file which test it is at (`tests.mutants.recorder.at_test`). A process that a test
starts, by exec or by a fork of another one, looks there once, at its beginning. What is killed
records nothing.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path

DATA, SOURCE, AT = "SAF_RECORDED", "SAF_RECORDED_SOURCE", "SAF_RECORDED_AT"
"""Environment variables: where to write, what to record, and the file that names the test."""


def _record() -> None:
    import coverage

    begun: list[coverage.Coverage] = []

    def begin() -> None:
        if begun:  # in a fork: what it had until then is its parent's to save
            begun[-1].stop()
        one = coverage.Coverage(
            data_file=os.environ[DATA],
            data_suffix=True,
            source=[os.environ[SOURCE]],
            config_file=False,
            messages=False,
            concurrency=["thread", "greenlet"],
        )
        one.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
        begun.append(one)
        one.start()
        at = os.environ.get(AT)
        if at and Path(at).exists():
            one.switch_context(Path(at).read_text())

    def save() -> None:
        begun[-1].stop()
        begun[-1].save()

    def leave(code: int) -> None:
        save()
        leave_at_once(code)

    leave_at_once, os._exit = os._exit, leave  # type: ignore[assignment] # it never returns
    atexit.register(save)
    os.register_at_fork(after_in_child=begin)
    begin()


if __name__ == "sitecustomize" and DATA in os.environ:
    _record()
