"""`saf purge` as operators meet it, and the archive that it writes."""

from __future__ import annotations

import json
import resource
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from saf.database import Dsn
from saf.log.archive import LOCK, ParquetArchive
from saf.log.ring import SLOTS, Contents, Slot
from saf.operating.maintenance import purge_broker
from tests.archives import read_inbox
from tests.pipeline import connect, forward
from tests.processes import start, wait
from tests.programs import configuration, last_json, run, saf, send
from tests.ring import leave_slot
from tests.scraping import value
from tests.waits import until

DONE, USAGE, TRY_AGAIN = 0, 2, 75
LONG_SECONDS = 120
GROWTH_MIB = 48


def fill_a_slot(app: Dsn, mom: Dsn, count: int) -> None:
    """Messages in the outbox that are forwarded, in a slot that ids have left."""
    send(app, count)
    forward(app, mom=mom)
    with connect(app) as connection:
        leave_slot(connection)


def purged(app: Dsn, folder: Path) -> Slot:
    with connect(app) as connection:
        return purge_broker(
            connection,
            retention_seconds=0,
            rotate_after_seconds=86400,
            archive=ParquetArchive(app, folder),
        ).slots[0]


def counted(app: Dsn) -> int:
    with connect(app) as connection:
        row = connection.execute("SELECT count(*) FROM saf.outbox").fetchone()
        assert row is not None
        return int(row[0])


def slots(done: Any) -> dict[str, Any]:
    """What a run with --json says about the slots of its one broker that are not empty."""
    assert done.returncode == DONE, done.stderr
    (broker,) = json.loads(done.stdout)["brokers"]
    return {f"{s['log']}_{s['number']}": s for s in broker["slots"] if s["state"] != "empty"}


# The command


def test_purge_frees_what_is_forwarded_and_old_enough(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    fill_a_slot(app, mom, 50)

    young = slots(saf("purge", "--json", cwd=tmp_path))
    assert young["outbox_0"]["state"] == "retained"

    dry = saf("purge", "--retention", "0", "--dry-run", "--json", cwd=tmp_path)
    assert slots(dry)["outbox_0"]["state"] == "purgeable"
    assert json.loads(dry.stdout)["dry_run"] is True
    assert counted(app) == 50

    done = saf("purge", "--retention", "0", "--json", cwd=tmp_path)
    assert slots(done)["outbox_0"] == {
        "log": "outbox",
        "number": 0,
        "state": "purged",
        "subscription": None,
        "messages": 50,
        "archive": None,
    }
    assert len(done.stdout.splitlines()) == 1
    assert counted(app) == 0


def test_a_purge_under_cron_says_in_metrics_what_it_has_emptied(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    fill_a_slot(app, mom, 50)
    of = {"broker": "app", "log": "outbox"}
    for options, emptied in ((["--dry-run"], 0), ([], 50), ([], 0)):
        done = saf(
            *("purge", "--retention", "0", *options, "--metrics-textfile", "purge.prom"),
            cwd=tmp_path,
        )
        assert done.returncode == DONE, done.stderr
        page = (tmp_path / "purge.prom").read_text()
        assert value(page, "saf_purged_messages_total", **of) == emptied
        assert value(page, "saf_purged_slots_total", **of) == (emptied > 0)


def test_people_see_a_line_for_each_slot_that_holds_something(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    send(app, 50)
    with connect(app) as connection:
        leave_slot(connection)
    wide = {"COLUMNS": "120"}

    kept = saf("purge", "--retention", "0", cwd=tmp_path, env=wide)
    assert kept.returncode == DONE, kept.stderr
    (row,) = (line for line in kept.stdout.splitlines() if "needed" in line)
    assert "shop" in row
    assert "subscription 'forwarder' has not read all" in row

    forward(app, mom=mom)
    done = saf("purge", "--retention", "0", cwd=tmp_path, env=wide)
    (row,) = (line for line in done.stdout.splitlines() if "purged" in line)
    assert "50" in row


def test_settings_say_what_options_do_not(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    fill_a_slot(app, mom, 5)
    send(app, 5)
    folder = tmp_path / "archive"
    file.write_text(
        file.read_text() + "[purge]\nretention_seconds = 0\nrotate_after_seconds = 0.01\n"
        f"archive = {json.dumps(str(folder))}\n"
    )
    said = slots(saf("purge", "--json", cwd=tmp_path))
    assert Path(said["outbox_0"]["archive"]).is_relative_to(folder)
    assert said["outbox_1"]["state"] == "rotated"


def test_one_broker_can_be_chosen_and_one_that_is_away_does_not_keep_the_others(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    away = Dsn("postgresql://saf_forwarder@127.0.0.1:1/nowhere")
    configuration(tmp_path / "saf.toml", {"away": away, "app": app}, {"mom": mom})

    done = saf("purge", "--json", cwd=tmp_path)
    assert done.returncode == TRY_AGAIN
    said = last_json(done.stdout)
    assert isinstance(said["brokers"], list)
    assert [broker["broker"] for broker in said["brokers"]] == ["app"]
    assert "unavailable" in str(said["errors"])

    assert saf("purge", "--broker", "app", cwd=tmp_path).returncode == DONE
    unknown = saf("purge", "--broker", "ap", cwd=tmp_path)
    assert unknown.returncode == USAGE
    assert (
        "no [brokers.ap] and no [destinations.ap] in saf.toml (did you mean 'app'?)"
        in unknown.stderr
    )


@pytest.mark.parametrize("wrong", ["soon", "-1d", "7 days", "1w", ""])
def test_a_retention_that_is_no_duration_is_refused(tmp_path: Path, wrong: str) -> None:
    done = saf("purge", f"--retention={wrong}", cwd=tmp_path)
    assert done.returncode == USAGE
    assert "is not a duration such as 7d" in " ".join(done.stderr.split()).replace(" │ │ ", " ")


# The archive


def test_the_archive_holds_exactly_what_went(tmp_path: Path, mom: Dsn) -> None:
    rows = read_inbox(mom)
    with connect(mom) as connection:
        outcome = purge_broker(
            connection,
            retention_seconds=0,
            rotate_after_seconds=86400,
            archive=ParquetArchive(mom, tmp_path),
        )
        ((broker_id,),) = connection.execute("SELECT broker_id::text FROM saf.broker").fetchall()
    slot = outcome.slots[SLOTS]
    assert isinstance(slot.archive, Path)
    assert slot.archive == tmp_path / broker_id / "inbox-0-1-4.parquet"
    archived = sorted(pq.read_table(slot.archive).to_pylist(), key=lambda row: int(row["id"]))
    for row in archived:
        row["headers"] = row["headers"] and json.loads(row["headers"])
    assert archived == rows
    assert {*slot.archive.parent.iterdir()} - {slot.archive.with_name(LOCK)} == {slot.archive}


def test_an_archive_that_did_not_come_to_the_truncate_is_replaced_by_the_next(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    fill_a_slot(app, mom, 50)
    archive = ParquetArchive(app, tmp_path)
    with connect(app) as connection, app.connect(role="test") as reader:

        def then_someone_reads(contents: Contents) -> Path | None:
            file = archive(contents)
            reader.execute("SELECT count(*) FROM saf.outbox")
            return file

        kept = purge_broker(
            connection,
            retention_seconds=0,
            rotate_after_seconds=86400,
            archive=then_someone_reads,
        ).slots[0]
        assert kept.state == "locked"
        assert counted(app) == 50
        (left,) = tmp_path.glob("*/*.parquet")
    gone = purged(app, tmp_path)
    assert (gone.state, gone.archive) == ("purged", left)
    assert len(pq.read_table(left)) == 50
    assert list(tmp_path.glob("*/*.parquet")) == [left]


def test_an_archive_of_messages_that_are_gone_replaces_nothing(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    """Such as that of a purge whose connection broke, so that another one took its turn."""
    fill_a_slot(app, mom, 50)
    seen: list[Contents] = []
    late = ParquetArchive(app, tmp_path)

    def remember(contents: Contents) -> Path | None:
        seen.append(contents)
        return late(contents)

    with connect(app) as connection:
        purge_broker(connection, retention_seconds=0, rotate_after_seconds=86400, archive=remember)
    assert counted(app) == 0
    assert late(seen[0]) is None
    (file,) = tmp_path.glob("*/*.parquet")
    assert len(pq.read_table(file)) == 50


def test_what_cannot_be_archived_is_kept(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    fill_a_slot(app, mom, 50)
    (tmp_path / "file").touch()
    done = saf("purge", "--retention", "0", "--archive", tmp_path / "file", cwd=tmp_path)
    assert done.returncode == TRY_AGAIN
    assert "file is unavailable: Not a directory" in done.stderr
    assert counted(app) == 50


def test_without_its_packages_the_archive_is_refused_and_nothing_is_purged(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    fill_a_slot(app, mom, 50)
    program = "import sys; sys.modules['pyarrow'] = None; from saf.cli import main; main()"
    command = [sys.executable, "-c", program, "purge", "--retention", "0", "--archive", "there"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == USAGE
    assert "pip install 'saf-outbox[forwarder]'" in done.stderr
    assert counted(app) == 50
    assert run(command[:-2], cwd=tmp_path).returncode == DONE
    assert counted(app) == 0


def archive_and_tell(app: Dsn, folder: Path, tell: Connection) -> None:
    slot = purged(app, folder)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tell.send((slot.state, slot.messages, peak_mib))


@pytest.mark.full
def test_archiving_four_times_as_much_needs_no_more_memory(tmp_path: Path, app: Dsn) -> None:
    found: list[tuple[str, int | None, float]] = []
    peaks = []
    with connect(app) as connection:
        # stored as it is: what counts is the memory of who reads it
        connection.execute("ALTER TABLE saf.outbox ALTER COLUMN body SET STORAGE EXTERNAL")
        for messages in (40_000, 160_000):
            connection.execute("SELECT setval('saf.outbox_id_seq', 1, false)")
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) SELECT 'billing', n::text, "
                "convert_to(repeat(md5(n::text), 64), 'UTF8') FROM generate_series(1, %s) AS n",
                [messages],
            )
            connection.execute("UPDATE saf.cursor SET done = pg_current_snapshot()")
            leave_slot(connection)
            told, tell = Pipe(duplex=False)

            def unlocked(told: Connection = told, tell: Connection = tell) -> bool:
                # Autovacuum has a slot of this size for as long as the disk takes.
                assert wait(start(archive_and_tell, app, tmp_path, tell)) == 0
                found.append(told.recv())
                return found[-1][0] != "locked"

            until(unlocked, LONG_SECONDS)
            state, count, peak_mib = found[-1]
            assert (state, count) == ("purged", messages)
            peaks.append(peak_mib)
    small, large = peaks
    assert large - small < GROWTH_MIB, "320 MiB of bodies need what 80 MiB need"
