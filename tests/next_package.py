"""The package that comes next: this one, with one more revision of the schema."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from saf.database import REVISION
from saf.database.queries import following
from tests.programs import ROOT, run

NEXT = following(REVISION)

ALLOWED = """
ALTER TABLE saf.outbox ADD COLUMN priority smallint;
ALTER TABLE saf.outbox ADD COLUMN urgent boolean DEFAULT false NOT NULL;
CREATE TABLE saf.tariff (service text PRIMARY KEY);
CREATE INDEX outbox_to_service ON saf.outbox (to_service);
CREATE FUNCTION saf.rated() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS 'BEGIN NEW.priority := 1; RETURN NEW; END';
CREATE TRIGGER rated BEFORE INSERT ON saf.outbox FOR EACH ROW EXECUTE FUNCTION saf.rated();
"""
"""All that a revision may add while senders of the revision before it run."""
BACK = """
DROP TRIGGER rated ON saf.outbox;
DROP FUNCTION saf.rated;
DROP INDEX saf.outbox_to_service;
DROP TABLE saf.tariff;
ALTER TABLE saf.outbox DROP COLUMN urgent, DROP COLUMN priority;
"""
SCRIPT = f'''
from saf.broker.migrate import apply

revision = "{NEXT}"
down_revision = "{REVISION}"


def upgrade() -> None:
    apply("""{ALLOWED}""")


def downgrade() -> None:
    apply("""{BACK}""")
'''
NUMBER = f'REVISION = "{REVISION}"'


def add_revision(migrations: Path) -> None:
    """Add the next revision to a copy of the folder ``migrations``."""
    (migrations / "versions" / f"{NEXT}_next.py").write_text(SCRIPT)


def next_package(folder: Path) -> Path:
    """Write the next package to a folder for PYTHONPATH; return the folder."""
    for part in ("saf", "migrations"):
        shutil.copytree(
            ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "static")
        )
    add_revision(folder / "migrations")
    queries = folder / "saf" / "database" / "queries.py"
    text = queries.read_text()
    assert text.count(NUMBER) == 1
    queries.write_text(text.replace(NUMBER, f'REVISION = "{NEXT}"'))
    return folder


def python(
    package: Path, *arguments: str, cwd: Path | None = None, tracebacks: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python, which imports saf from this folder."""
    return run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": str(package)},
        cwd=cwd or package,
        tracebacks=tracebacks,
    )
