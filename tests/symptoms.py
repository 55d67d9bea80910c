"""What the tests of docs/troubleshooting.md share: its rows, and the site that shows a symptom.

A test causes a symptom, finds the page's quoted text in what saf prints, runs the page's commands
as they stand, and checks that every message has arrived once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from saf import receive
from saf.database import Dsn
from tests.pages import page, shell
from tests.programs import BIN, NOTHING, received, run, saf

PAGE = "troubleshooting.md"
OPERATOR, AGAIN = 2, 75
EXAMINING = re.compile(r"^saf (?:doctor|reconcile)\b.*$", re.MULTILINE)
"""Commands that only read, and exit with 1 if they find a problem."""


@dataclass(frozen=True)
class Row:
    """A row of one of the page's tables."""

    symptom: str
    cause: str
    cure: str

    @property
    def quoted(self) -> list[str]:
        """The texts that saf prints, each by itself."""
        return re.findall(r'"([^"]+)"', self.symptom)

    @property
    def commands(self) -> list[str]:
        """The commands of the cure, in their order."""
        spans = re.findall("`([^`]+)`", self.cure)
        return [span for span in spans if span.startswith(("saf ", "psql "))]


def rows() -> list[Row]:
    """Return the rows of the page's tables."""
    lines = [line for line in page(PAGE).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [Row(*row) for row in cells if row[0] not in ("you see", "---")]


def symptom(start: str) -> Row:
    """Return the only row that starts like this."""
    (row,) = [row for row in rows() if row.symptom.startswith(start)]
    return row


def seen(texts: Iterable[str], printed: str) -> None:
    """Check that saf prints what the page quotes."""
    assert texts
    for text in texts:
        pattern = ".*".join(map(re.escape, text.split("…")))
        assert re.search(pattern, printed), f"{text!r} is not in {printed!r}"


def filled(script: str, values: Mapping[str, str]) -> str:
    """Return commands with values for their words in capitals."""
    for word, value in values.items():
        assert re.search(rf"\b{word}\b", script), f"{word} is not in {script}"
        script = re.sub(rf"\b{word}\b", value, script)
    return script


def forward(folder: Path, expected: int, **env: str) -> str:
    """Run `saf forward`, and return what it printed on standard error."""
    done = saf("forward", cwd=folder, env=env)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stderr


def arrived(mom: Dsn) -> list[str]:
    """Return the bodies in the store."""
    return [body for _, body in received(mom)]


def purging(folder: Path) -> Path:
    """Let a purge keep nothing for its age."""
    with (folder / "saf.toml").open("a") as file:
        file.write("[purge]\nretention_seconds = 0\n")
    return folder


def handle(mom: Dsn) -> None:
    """Receive all that the service has."""
    received_any = True
    while received_any:
        with receive(mom, "billing") as delivery:
            received_any = bool(list(delivery))


@dataclass(frozen=True)
class Site:
    """A folder with a saf.toml, which forwards from ``shop`` to ``mom``."""

    folder: Path
    app: Dsn
    mom: Dsn

    def run(self, *commands: str, path: str = "", **values: str) -> str:
        """Run the page's commands, with values for their words in capitals; return stdout."""
        script = filled("\n".join(commands), values)
        script = EXAMINING.sub(r"\g<0> || test $? = 1", script)
        return shell(script, self.folder, self.app, self.mom, path=path)

    def fails(self, command: str, expected: int, env: Mapping[str, str] = NOTHING) -> str:
        """Run a command that ends with this exit code; return all that it printed."""
        values = {"SHOP_DSN": self.app.conninfo, "MOM_DSN": self.mom.conninfo, **env}
        program, *arguments = command.split()
        done = run([BIN / program, *arguments], cwd=self.folder, env=values, tracebacks=True)
        printed = done.stdout + done.stderr
        assert done.returncode == expected, printed
        return printed

    def replace(self, old: str, new: str) -> None:
        """Change saf.toml."""
        file = self.folder / "saf.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def append(self, text: str) -> None:
        """Add a table to saf.toml."""
        with (self.folder / "saf.toml").open("a") as file:
            file.write(text)
