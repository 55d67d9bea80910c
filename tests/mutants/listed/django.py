"""The Django app: the ORM's transaction, flush, tasks and the admin."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

SUITE = "integration/test_django.py::test_inside_of_djangos_test_runner"

MUTANTS: list[Mutant] = [
    mutant(
        "a failed handler's functions are called after the commit",
        "saf/receiving/link.py",
        "del self._connection.run_on_commit[registered:]",
        "self._connection.run_on_commit[registered:]",
        SUITE,
    ),
    mutant(
        "a transaction that Django rolls back counts as committed",
        "saf/receiving/savepoints.py",
        "        self._state.check()\n",
        "        pass\n",
        SUITE,
    ),
    mutant(
        "a flush leaves saf's messages",
        "saf/django/management/commands/flush.py",
        "            schema.empty(using)\n",
        "            pass\n",
        SUITE,
    ),
    mutant(
        "a message may name any function to be called as a task",
        "saf/django/tasks.py",
        "if not isinstance(found, Task):",
        "if not callable(found):",
        SUITE,
    ),
    mutant(
        "the admin shows bodies that are hidden",
        "saf/django/admin.py",
        "if not bodies:",
        "if bodies is None:",
        SUITE,
    ),
]
