"""A pytest that has collected all tests, and forks for each mutant: starting takes no time.

`Field` starts it as a plugin of pytest. At the place where pytest would run its tests, it answers
requests instead, one JSON line each: which tests, and where the changed module is. A child of this
process replaces the code of the changed functions, and runs the tests until one fails. What the
tests start as programs, or import later, comes from the changed file.

Only changes within functions can be made in this way (`patches`): a constant may already be part of
others.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import pytest

from tests.mutants.warm import waited

NOT_RUN = 70
"""Exit code if the tests could not be run; other than pytest's own."""

Where = tuple[str, int]
"""Qualified name and first line of a function."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Answer requests until the other end is gone."""
    items = {item.nodeid: item for item in session.items}
    requests = os.fdopen(int(os.environ.pop("SAF_REQUESTS")))
    answers = os.fdopen(int(os.environ.pop("SAF_ANSWERS")), "w")
    gc.unfreeze()  # conftest has frozen what it has imported
    functions = _functions(str(Path.cwd()))
    gc.collect()
    gc.freeze()  # so that children do not copy what they only collect
    print(json.dumps(sorted(items)), file=answers, flush=True)
    for line in requests:
        given = json.loads(line)
        chosen = [items[name] for name in given["tests"] if name in items]
        print(json.dumps(_run(session, chosen, functions, given, requests.fileno())), file=answers)
        answers.flush()
    return True


def _run(
    session: pytest.Session,
    chosen: Sequence[pytest.Item],
    functions: dict[str, dict[Where, list[FunctionType]]],
    given: dict[str, Any],
    requests: int,
) -> dict[str, Any]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(session, chosen, functions, given)
    return waited(child, began, given["seconds"], requests)


def _become(
    session: pytest.Session,
    chosen: Sequence[pytest.Item],
    functions: dict[str, dict[Where, list[FunctionType]]],
    given: dict[str, Any],
) -> NoReturn:
    """Be the process of one mutant, with all that it starts in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = NOT_RUN
    try:
        with Path(given["said"]).open("w") as said:
            _patch(functions.get(given["file"], {}), given["before"], given["after"])
            code = _tested(session, chosen, said)
    except BaseException as error:
        with Path(given["said"]).open("a") as said:
            said.write(f"{error!r}\n")
    os._exit(code)


class _Failures:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.texts.append(f"FAILED {report.nodeid}\n{report.longreprtext}\n")


def _tested(session: pytest.Session, chosen: Sequence[pytest.Item], said: Any) -> int:
    """Run tests until one fails; return pytest's exit code."""
    failures = _Failures()
    session.config.pluginmanager.register(failures)
    # tests with the same fixtures of a module follow each other, as pytest would run them
    order = {item.nodeid: number for number, item in enumerate(session.items)}
    ahead = sorted(chosen, key=lambda item: order[item.nodeid])
    for number, item in enumerate(ahead):
        following = ahead[number + 1] if number + 1 < len(ahead) else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failures.texts:
            session._setupstate.teardown_exact(None)
            said.write("".join(failures.texts))
            return 1
    said.write(f"{len(ahead)} passed\n")
    return 0 if ahead else 5


def _functions(tree: str) -> dict[str, dict[Where, list[FunctionType]]]:
    """Return all functions of the tree's modules, by file and place."""
    found: dict[str, dict[Where, list[FunctionType]]] = defaultdict(lambda: defaultdict(list))
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(f"{tree}/saf"):
            code = one.__code__
            file = code.co_filename.removeprefix(f"{tree}/")
            found[file][code.co_qualname, code.co_firstlineno].append(one)
    return found


def _patch(functions: dict[Where, list[FunctionType]], before: str, after: str) -> None:
    """Give the functions of a module their changed code."""
    changed = patches(before, after)
    assert changed is not None
    for where, code in changed.items():
        for function in functions.get(where, ()):
            function.__code__ = code


def patches(before: str, after: str) -> dict[Where, CodeType] | None:
    """Return the changed functions of a module; None if anything else has changed, too.

    >>> old = "def f():\\n    return 1\\nA = 1\\n"
    >>> list(patches(old, old.replace("return 1", "return 2")))
    [('f', 1)]
    >>> patches(old, old.replace("A = 1", "A = 2")) is None
    True
    """
    pairs = [*_codes(compile(before, "saf", "exec", dont_inherit=True))]
    others = [*_codes(compile(after, "saf", "exec", dont_inherit=True))]
    if [name for name, *_ in pairs] != [name for name, *_ in others]:
        return None
    found: dict[Where, CodeType] = {}
    for (_, old, outer), (_, new, functions) in zip(pairs, others, strict=True):
        if _shallow(old) == _shallow(new):
            continue
        if not outer:
            return None
        for one, other in zip(outer, functions, strict=True):
            if one.co_freevars != other.co_freevars:
                return None
            found[one.co_qualname, one.co_firstlineno] = other
    return found


def _codes(
    code: CodeType, outer: tuple[CodeType, ...] = ()
) -> Iterator[tuple[str, CodeType, tuple[CodeType, ...]]]:
    """Give each code of a module, with the functions that it is in, itself too."""
    if code.co_flags & 0x2:  # CO_NEWLOCALS: a function, and no module or body of a class
        outer = (*outer, code)
    yield code.co_qualname, code, outer
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one, outer)


def _shallow(code: CodeType) -> tuple[Any, ...]:
    """Return what a code does, without the functions in it."""
    consts = [repr(one) for one in code.co_consts if not isinstance(one, CodeType)]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_flags
    return code.co_code, consts, names, code.co_argcount
