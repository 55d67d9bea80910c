"""Programs that a test needs and that Python's packages do not bring."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from saf_demo.servers import Missing

EVERYWHERE = f"{os.environ.get('PATH', '')}:/usr/sbin"

MISSING = re.compile(r"is missing here: (?P<install>.+)$")
APT = "apt install "


def needed(program: str, package: str) -> str:
    """Return the path of a program. Without it, the test is skipped on a laptop and fails in CI."""
    found = shutil.which(program, path=EVERYWHERE)
    if found is None:
        absent(program, f"{APT}{package}")
    return found


@contextmanager
def installed() -> Iterator[None]:
    """End the test if a server of `saf_demo.servers` is missing."""
    try:
        yield
    except Missing as missing:
        absent(missing.server, missing.install.partition(",")[0])


def absent(what: str, install: str) -> NoReturn:
    """End a test that cannot run here; `install` is the command that brings what is missing."""
    sentence = f"{what} is missing here: {install}"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


def summary(reasons: Iterable[str]) -> str:
    """Return how many tests were skipped because a program is missing, and what installs it.

    >>> print(summary(["nginx is missing here: apt install nginx", "no network",
    ...                "curl is missing here: apt install curl",
    ...                "Kafka is missing here: make kafka"]))
    3 tests skipped for missing programs; to run them: apt install curl nginx; make kafka
    >>> summary([])
    ''
    """
    found = [match["install"] for match in map(MISSING.search, reasons) if match]
    packages = sorted({one.removeprefix(APT) for one in found if one.startswith(APT)})
    commands = [f"{APT}{' '.join(packages)}"] if packages else []
    commands += sorted({one for one in found if not one.startswith(APT)})
    if not found:
        return ""
    tests = "1 test" if len(found) == 1 else f"{len(found)} tests"
    return f"{tests} skipped for missing programs; to run them: {'; '.join(commands)}"
