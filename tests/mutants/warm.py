"""A process that has imported what tests import from others, and forks for each run of pytest.

To start Python, and to import pytest, Arrow, pandas and SQLAlchemy, takes longer than most tests.
It runs as a program of its own, by its path, so that it has nothing of the tree that is tested:
each run imports that anew, with the bug that is planted at the time.

    python tests/mutants/warm.py      what to import first, then a run a line, as JSON; answers too
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

RAISED = 70
"""Exit code where pytest itself has raised an exception, before or after its tests."""

GRACE_SECONDS = 20.0
"""How long a run may take to end that was interrupted, before it is killed."""


def main() -> None:
    """Answer until the other end is gone."""
    for name in json.loads(sys.stdin.readline()):
        with suppress(Exception):  # what cannot be imported by itself is left to the run
            importlib.import_module(name)
    del sys.path[0]  # this file's folder
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(given: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(given)
    return waited(child, began, given["seconds"], sys.stdin)


def waited(child: int, began: float, seconds: float, requests: Any) -> dict[str, Any]:
    """Return the exit code of a run (None: it hung) and its seconds; end a run that takes longer.

    If the other end of ``requests`` is gone, the run is over too: nothing arrives before its end.
    """
    descriptor = os.pidfd_open(child)
    try:
        ended = descriptor in select.select([descriptor, requests], [], [], seconds)[0]
        for number in () if ended else (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(child, number)
            if select.select([descriptor], [], [], GRACE_SECONDS)[0]:
                break
    finally:
        os.close(descriptor)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return {"code": code, "seconds": time.monotonic() - began}


def _become(given: dict[str, Any]) -> NoReturn:
    """Be the process of this run, with all that it starts in a session of its own."""
    os.setsid()
    said = os.open(given["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, stream in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    sys.argv = ["pytest", *given["arguments"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import pytest

    try:
        code = pytest.main(given["arguments"])
    except Exception:
        traceback.print_exc()
        code = RAISED  # an uncaught exception would end the process like a failed test
    sys.exit(code)


def imported(tree: Path) -> list[str]:
    """Which modules of others a run of pytest in a tree has imported, in their order."""
    importlib.import_module("tests.conftest")
    # pytest rewrites these, and warns if they were imported before
    left_out = {"__main__", "__mp_main__", "sitecustomize"}
    for one in {one.dist for one in entry_points(group="pytest11") if one.dist}:
        left_out |= {file.parts[0].removesuffix(".py") for file in one.files or []}
    return [
        name
        for name, module in [*sys.modules.items()]
        if (file := getattr(module, "__file__", None)) and not Path(file).is_relative_to(tree)
        if name.partition(".")[0] not in left_out
    ]


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(imported(Path(sys.argv[1]))))
    else:
        main()
