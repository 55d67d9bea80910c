"""What a person does who was told that something was set back: the commands of docs/operations.md.

They are the commands themselves, in this process.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from uuid import UUID

from saf.cli import main
from saf.database import Dsn

A_YEAR = 365 * 86400


class NoWayOut(AssertionError):
    """The documented command does not repair what was refused."""


class Person:
    """Somebody with a saf.toml; each broker and each destination is in it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "saf.toml"

    def repair(self, app: Dsn, stores: Mapping[str, Dsn]) -> Counter[str]:
        """All forwarders and receivers are stopped: make each broker usable again.

        Return how many copies each store may have lost that are not sent again, as it says.

        Raises:
            NoWayOut
        """
        self._configure(app, stores)
        code, said = self.saf("rebase", "--json")
        if code != 0:
            raise NoWayOut(f"saf rebase: exit code {code}: {said}")
        left = json.loads(said)["left_out"].get("app", {})
        return Counter(left.get("uncertain", {}))

    def compare(self, app: Dsn, stores: Mapping[str, Dsn]) -> set[UUID]:
        """Ask whether anything is lost, and have it sent again; which messages those are.

        Raises:
            NoWayOut
        """
        self._configure(app, stores)
        code, said = self.saf("reconcile", "--broker", "app", "--json")
        if code not in (0, 1):
            raise NoWayOut(f"saf reconcile: exit code {code}: {said}")
        if code == 0 or '"lost"' not in said:
            return set()
        code, said = self.saf("replay", "--broker", "app", "--why", "a test", "--json")
        if code != 0:
            raise NoWayOut(f"saf replay: exit code {code}: {said}")
        by_destination = json.loads(said)["message_ids"]["app"]
        return {UUID(one) for some in by_destination.values() for one in some}

    def saf(self, *arguments: str) -> tuple[int, str]:
        """The command ``saf``: its exit code, and what it said."""
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            try:
                main([*arguments, "--config", str(self.file)])
            except SystemExit as end:
                code = end.code
            else:
                code = 0
        return (code if isinstance(code, int) else 1), said.getvalue()

    def _configure(self, app: Dsn, stores: Mapping[str, Dsn]) -> None:
        lines = [f"[brokers.app]\ndsn = {json.dumps(app.conninfo)}"]
        for name, dsn in stores.items():
            lines += [f"[brokers.{name}]\ndsn = {json.dumps(dsn.conninfo)}"]
            lines += [f"[destinations.{name}]\ndsn = {json.dumps(dsn.conninfo)}"]
        lines += [f"[purge]\nretention_seconds = {A_YEAR}"]
        self.file.write_text("\n".join(lines) + "\n")
