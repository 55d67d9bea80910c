"""Install packages by pip, and show how far it has got: python packaging/install.py '.[demo]'.

pip shows hundreds of lines, or none for minutes. This shows the current step with the seconds since
the start: on a terminal in one line, elsewhere a line every `LINE_SECONDS`. If pip fails, its last
lines follow. It needs nothing but Python, because nothing else is installed yet.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

SHOW_SECONDS = 0.5
LINE_SECONDS = 5.0
MOST_LINES = 40
"""Lines of pip that a failure shows."""
WIDTH = 79
"""Longest line, where no terminal has a width."""

COLLECTING = re.compile(r"Collecting (\S+?)(?:[<>=!~;\[(,]\S*)?(?: .*)?")
LOADING = re.compile(r"\s*(?:Downloading|Using cached) (\S+)(?: \((.*)\))?")
BUILDING = re.compile(r"\s*Building (?:editable|wheel) for (\S+) .*: started")
INSTALLING = re.compile(r"Installing collected packages: (.*)")


class Progress:
    """The step that pip is at, as its lines tell.

    >>> progress = Progress(lambda: 0)
    >>> progress.hear("Collecting pyarrow>=24 (from saf-outbox==0.1.0)"); progress.step()
    'finding pyarrow'
    >>> progress.hear("  Downloading pyarrow-24.0.0-cp312.whl (47.6 MB)"); progress.step()
    'getting pyarrow-24.0.0-cp312.whl (47.6 MB)'
    >>> progress.hear("  Building wheel for pyspark (pyproject.toml): started"); progress.step()
    'building pyspark'
    >>> progress.hear("Installing collected packages: pytz, pyspark"); progress.step()
    'installing 0 of 2 packages'
    """

    def __init__(self, installed: object) -> None:
        self._installed = installed if callable(installed) else lambda: 0
        self._step = "starting pip"
        self._before = self._total = 0

    def hear(self, line: str) -> None:
        """Note a line of pip."""
        if match := COLLECTING.fullmatch(line):
            self._step = f"finding {match[1]}"
        elif match := LOADING.fullmatch(line):
            self._step = f"getting {match[1]}" + (f" ({match[2]})" if match[2] else "")
        elif match := BUILDING.fullmatch(line):
            self._step = f"building {match[1]}"
        elif match := INSTALLING.fullmatch(line):
            self._before, self._total = self._installed(), len(match[1].split(", "))

    def step(self) -> str:
        """Return the current step."""
        if not self._total:
            return self._step
        return f"installing {self._installed() - self._before:,} of {self._total:,} packages"


def installed() -> int:
    """Return the number of packages that this environment has."""
    return sum(1 for folder in Path(sys.prefix).glob("lib/python*/site-packages/*.dist-info"))


def show(progress: Progress, began: float, over: Event) -> None:
    """Show the step until pip has ended."""
    people = sys.stdout.isatty()
    while not over.wait(SHOW_SECONDS if people else LINE_SECONDS):
        width = shutil.get_terminal_size().columns - 1 if people else WIDTH
        line = f"  {time.monotonic() - began:3.0f} s  {progress.step()}"[:width]
        print(f"\r{line:{width}}" if people else line, end="" if people else "\n", flush=True)
    if people:
        print("\r" + " " * (shutil.get_terminal_size().columns - 1), end="\r", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Install; return pip's exit code."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-color", *arguments]
    began, over, last = time.monotonic(), Event(), deque[str](maxlen=MOST_LINES)
    progress = Progress(installed)
    with subprocess.Popen(  # noqa: S603 - pip of this environment
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as pip:
        shower = Thread(target=show, args=(progress, began, over), daemon=True)
        shower.start()
        try:
            for line in pip.stdout or ():
                last.append(line)
                progress.hear(line.rstrip())
            code = pip.wait()
        finally:
            over.set()
            shower.join()
    if code:
        sys.stderr.writelines(last)
    else:
        print(f"  installed in {time.monotonic() - began:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
