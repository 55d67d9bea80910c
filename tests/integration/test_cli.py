"""The command line: what a user's mistake is answered with, and what scripts can rely on."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from saf.broker.embedded import EmbeddedServer
from saf.cli.console import EXIT_CODES
from saf.config import Forwarder
from saf.database import REVISION, Dsn
from tests.programs import BIN, ROOT, configuration, last_json, run, saf, send

NOWHERE = "postgresql://saf_forwarder@127.0.0.1:1/nowhere"
MINIMAL = f"""
[brokers.shop]
dsn = "{NOWHERE}"
[destinations.mom]
dsn = "{NOWHERE}"
"""
CANARY = "canary-Wq5tB8"

DONE, OTHER, USAGE, TRY_AGAIN = 0, 1, 2, 75


def refused(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one sentence on stderr of a command that ended with ``code`` and did nothing."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("saf: ")
    return sentence


def wrong_file(folder: Path, text: str) -> str:
    """What `saf status` says about a saf.toml with this text."""
    (folder / "saf.toml").write_text(text)
    return refused(saf("status", cwd=folder), USAGE)


# saf.toml


def test_a_missing_file_is_named_with_the_ways_to_name_another(tmp_path: Path) -> None:
    said = refused(saf("status", cwd=tmp_path), USAGE)
    assert "saf.toml: No such file" in said
    assert "--config" in said
    assert "SAF_CONFIG" in said
    assert "other.toml" in refused(saf("forward", "--config", tmp_path / "other.toml"), USAGE)


@pytest.mark.parametrize(
    ("table", "misspelt", "meant"),
    [
        ("brokers.shop", "dns", "dsn"),
        ("destinations.mom", "qualty", "quality"),
        ("forwarder", "chunk_row", "chunk_rows"),
        ("forwarder", "lease_secs", "lease_seconds"),
        ("forwarder", "default_destnation", "default_destination"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant(
    tmp_path: Path, table: str, misspelt: str, meant: str
) -> None:
    others = "".join(part for part in _tables(MINIMAL) if f"[{table}]" not in part)
    said = wrong_file(tmp_path, f'{others}[{table}]\n{misspelt} = "x"\n')
    assert f"unknown setting {table}.{misspelt}" in said
    assert f"did you mean '{meant}'?" in said


def test_a_misspelt_table_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    said = wrong_file(tmp_path, MINIMAL + "[forwarders]\nchunk_rows = 5\n")
    assert "unknown setting forwarders (did you mean 'forwarder'?)" in said


def test_a_default_destination_that_is_not_there_is_refused_with_the_one_that_was_meant(
    tmp_path: Path,
) -> None:
    said = wrong_file(tmp_path, MINIMAL + '[forwarder]\ndefault_destination = "mon"\n')
    assert "[destinations.mon] is missing (did you mean 'mom'?)" in said


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "destinations"),
        ("[brokers]\n[destinations.mom]\ndsn = 'dbname=x'", "brokers"),
        ("[brokers.shop]\n[destinations.mom]\ndsn = 'dbname=x'", "brokers.shop.dsn"),
        (MINIMAL + "[forwarder]\nchunk_rows = 0", "forwarder.chunk_rows"),
        (MINIMAL + "[forwarder]\nchunk_rows = 'many'", "forwarder.chunk_rows"),
        (MINIMAL + "[forwarder]\nlease_seconds = 0.5", "forwarder.lease_seconds"),
        (MINIMAL + "[forwarder]\nattempts = 0", "forwarder.attempts"),
        (MINIMAL.replace("[dest", "quality = 'x'\n[dest"), "brokers.shop.quality"),
        (MINIMAL + "quality = 'twice'", "destinations.mom.quality"),
        ("[brokers.shop]\ndsn = 5\n[destinations.mom]\ndsn = 'dbname=x'", "brokers.shop.dsn"),
        ("[brokers.'']\ndsn = 'dbname=x'\n[destinations.mom]\ndsn = 'dbname=x'", "1 to 255"),
        ("brokers = 5\ndestinations = 5", "brokers"),
        ("[brokers", "not TOML"),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, text: str, named: str) -> None:
    said = wrong_file(tmp_path, text)
    assert "saf.toml" in said
    assert named in said


def test_an_environment_variable_that_is_not_set_is_named_with_the_setting_that_needs_it(
    tmp_path: Path,
) -> None:
    said = wrong_file(tmp_path, MINIMAL.replace(NOWHERE, "dbname=x password=${SHOP_PW}", 1))
    assert "brokers.shop.dsn needs the environment variable SHOP_PW, which is not set" in said


def test_a_dsn_that_is_none_is_refused_without_showing_it(tmp_path: Path) -> None:
    for wrong in (f"postgresql://saf_forwarder:{CANARY}@[host/db", f"nonsense={CANARY} dbname=x"):
        said = wrong_file(tmp_path, MINIMAL.replace(NOWHERE, wrong, 1))
        assert "not a PostgreSQL connection string" in said
        assert CANARY not in said


def test_the_environment_overrides_single_settings(tmp_path: Path) -> None:
    (tmp_path / "saf.toml").write_text(MINIMAL)
    done = saf("status", cwd=tmp_path, env={"SAF_FORWARDER__CHUNK_ROWS": "none"})
    assert "forwarder.chunk_rows" in refused(done, USAGE)


# saf forward


def test_help_names_every_option_of_forward() -> None:
    done = saf("forward", "--help")
    assert done.returncode == DONE
    for option in ("--config", "--loop", "--interval", "--master", "--json"):
        assert option in done.stdout


def test_wrong_usage_ends_with_2_and_names_what_was_wrong() -> None:
    for arguments, named in (
        (["forward", "--lop"], "--lop"),
        (["forward", "--interval", "soon"], "--interval"),
        (["forwrd"], "forwrd"),
        (["migrate"], "--dsn"),
    ):
        done = saf(*arguments)
        assert done.returncode == USAGE
        assert done.stdout == ""
        assert named in done.stderr


def test_forward_delivers_reports_one_json_line_and_finds_nothing_the_second_time(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, master="local[1]")
    send(app, 50)
    for expected in (50, 0):
        done = saf("forward", "--json", cwd=tmp_path)
        assert done.returncode == DONE, done.stderr
        assert len(done.stdout.splitlines()) == 1
        summary = last_json(done.stdout)
        assert summary["forwarded"] == expected
        assert summary["exit_code"] == DONE
        assert summary["problems"] == []


def test_forward_ends_with_75_and_one_sentence_while_a_database_is_away(
    tmp_path: Path, app: Dsn
) -> None:
    nowhere = Dsn(make_conninfo(NOWHERE, password=CANARY))
    configuration(tmp_path / "saf.toml", {"app": app, "b": nowhere}, {"mom": app})
    done = saf("forward", cwd=tmp_path)
    assert done.returncode == TRY_AGAIN, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("saf: "))
    assert "127.0.0.1" in said
    assert "unavailable" in said
    assert CANARY not in done.stdout + done.stderr


def test_forward_ends_with_2_on_a_database_without_the_schema(
    tmp_path: Path, mom: Dsn, new_database: Callable[[str], Dsn]
) -> None:
    bare = new_database("bare")
    configuration(tmp_path / "saf.toml", {"bare": bare}, {"mom": mom})
    done = saf("forward", cwd=tmp_path)
    assert done.returncode == USAGE, done.stderr
    assert f"database '{bare.database}' has no saf schema: run `saf migrate" in done.stderr


def test_a_run_names_what_waits_for_a_destination_that_was_fixed(
    tmp_path: Path, app: Dsn, mom: Dsn, new_database: Callable[[str], Dsn]
) -> None:
    send(app, 1)
    file = tmp_path / "saf.toml"
    configuration(file, {"app": app}, {"mom": new_database("bare")})
    assert saf("forward", cwd=tmp_path).returncode == USAGE
    configuration(file, {"app": app}, {"mom": mom})
    done = saf("forward", cwd=tmp_path)
    assert done.returncode == TRY_AGAIN
    waits, again = done.stderr.splitlines()
    assert waits.startswith("saf: messages wait for destination 'mom', next attempt 2")
    assert "; last error: database '" in waits
    assert again == "saf: to try again now: `saf parked retry-now`, then `saf forward`"
    saf("parked", "retry-now", cwd=tmp_path)
    assert "(mom: 1)" in saf("forward", cwd=tmp_path).stdout


def test_help_has_the_table_of_exit_codes_and_so_has_the_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    helps = [" ".join(saf(*words, "--help").stdout.split()) for words in ([], ["forward"])]
    for code, means in EXIT_CODES.items():
        assert all(f" {code} {means}" in text for text in helps)
        assert f"| {code} | {means} |" in page


# saf status


def test_status_tells_scripts_what_is_pending_and_who_is_at_it(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    send(app, 50)

    unasked = last_json(saf("status", "--json", cwd=tmp_path).stdout)["brokers"][0]
    assert "shards" not in unasked
    assert unasked["unowned_shards"] == "0-63"

    done = saf("status", "--json", "--shards", cwd=tmp_path)

    assert done.returncode == DONE, done.stderr
    assert len(done.stdout.splitlines()) == 1
    status = json.loads(done.stdout)
    assert status["errors"] == []
    (broker,) = status["brokers"]
    assert broker["broker"] == "app"
    assert broker["pending"] == 50
    assert 0 <= broker["oldest_pending_seconds"] < 60
    assert (broker["parked"], broker["dead_letters"]) == (0, 0)
    assert [shard["shard"] for shard in broker["shards"]] == list(range(64))
    assert sum(shard["pending"] for shard in broker["shards"]) == 50
    for shard in broker["shards"]:
        _assert_shard(shard)


def _assert_shard(shard: dict[str, Any]) -> None:
    assert set(shard) >= {"owner", "epoch", "batch", "open", "oldest", "lag_seconds"}
    assert shard["owner"] is None
    assert (shard["oldest"] is None) == (shard["pending"] == 0)
    assert (shard["lag_seconds"] is None) == (shard["pending"] == 0)


def test_status_shows_people_a_table_with_a_line_per_broker_and_per_shard(
    tmp_path: Path, new_broker: Callable[[str], Dsn]
) -> None:
    shop, billing = new_broker("shop"), new_broker("billing")
    configuration(tmp_path / "saf.toml", {"shop": shop, "billing": billing}, {"mom": shop})
    send(shop, 1234)

    overview = saf("status", cwd=tmp_path, env={"COLUMNS": "120"})
    assert overview.returncode == DONE, overview.stderr
    (row,) = (line for line in overview.stdout.splitlines() if "shop" in line)
    assert "1,234" in row
    assert "no running forwarder owns shards 0-63" in row
    assert "billing" in overview.stdout

    shards = saf("status", "--shards", cwd=tmp_path, env={"COLUMNS": "120"})
    assert len(shards.stdout.splitlines()) > len(overview.stdout.splitlines()) + 2 * 64


def test_status_reports_the_brokers_that_answer_and_ends_with_75_for_one_that_does_not(
    tmp_path: Path, app: Dsn
) -> None:
    away = Dsn(make_conninfo(NOWHERE, password=CANARY))
    configuration(tmp_path / "saf.toml", {"app": app, "away": away}, {"mom": app})

    table = saf("status", cwd=tmp_path)
    assert table.returncode == TRY_AGAIN
    assert "app" in table.stdout
    (said,) = table.stderr.splitlines()
    assert said.startswith("saf: broker 'away'")
    assert "Connection refused" in said

    done = saf("status", "--json", cwd=tmp_path)
    assert done.returncode == TRY_AGAIN
    status = json.loads(done.stdout)
    assert [broker["broker"] for broker in status["brokers"]] == ["app"]
    assert [error["broker"] for error in status["errors"]] == ["away"]
    assert CANARY not in table.stdout + table.stderr + done.stdout + done.stderr


def test_status_ends_with_2_on_a_database_without_the_schema(
    tmp_path: Path, new_database: Callable[[str], Dsn]
) -> None:
    bare = new_database("bare")
    configuration(tmp_path / "saf.toml", {"bare": bare}, {"mom": bare})
    done = saf("status", cwd=tmp_path)
    assert done.returncode == USAGE
    assert "saf migrate" in done.stderr


# saf migrate


def test_migrate_creates_the_schema_and_may_be_repeated(new_database: Callable[[str], Dsn]) -> None:
    dsn = new_database("fresh")
    for change in ("created with 16 shards", "unchanged"):
        done = saf("migrate", "--dsn", dsn.conninfo, "--shards", "16")
        assert done.returncode == DONE, done.stderr
        assert done.stdout == f"{dsn.database}: saf schema {REVISION}, {change}\n"
    with dsn.connect(role="test") as connection:
        assert connection.execute("SELECT shards FROM saf.broker").fetchone() == (16,)
    other = saf("migrate", "--shards", "32", env={"SAF_DSN": dsn.conninfo})
    assert "has 16 shards" in refused(other, USAGE)


def test_migrate_ends_with_75_where_no_server_answers() -> None:
    said = refused(saf("migrate", env={"SAF_DSN": NOWHERE}), TRY_AGAIN)
    assert "127.0.0.1" in said
    assert "Connection refused" in said


@pytest.mark.parametrize(
    "dsn", [f"saf:{CANARY}@host", f"postgresql://saf_forwarder:{CANARY}@host", ""]
)
def test_migrate_ends_with_2_on_a_dsn_that_is_none_and_does_not_show_it(dsn: str) -> None:
    done = saf("migrate", "--dsn", dsn)
    assert done.returncode == USAGE
    assert "dsn" in done.stderr
    assert CANARY not in done.stdout + done.stderr


def test_migrate_ends_with_2_on_a_number_of_shards_that_cannot_be(app: Dsn) -> None:
    said = refused(saf("migrate", "--dsn", app.conninfo, "--shards", "0"), USAGE)
    assert "1 to 1024" in said


def test_a_wrong_password_is_said_and_not_shown(own_server: EmbeddedServer, tmp_path: Path) -> None:
    database = own_server.create_database("locked")
    with database.connect(role="test") as connection:
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'right'")
    (own_server.data_dir / "pg_hba.conf").write_text(
        "local all guest scram-sha-256\nlocal all all trust\n"
    )
    with database.connect(role="test") as connection:
        connection.execute("SELECT pg_reload_conf()")
    wrong = Dsn(make_conninfo(database.conninfo, user="guest", password=CANARY))
    said = refused(saf("migrate", env={"SAF_DSN": wrong.conninfo}), USAGE)
    assert "the password is wrong or missing: fix" in said.replace("The", "the")
    assert 'password authentication failed for user "guest"' in said
    assert CANARY not in said
    configuration(tmp_path / "saf.toml", {"app": wrong}, {"mom": wrong})
    status = saf("status", cwd=tmp_path)
    assert status.returncode == USAGE
    assert "password authentication failed" in status.stderr
    assert CANARY not in status.stdout + status.stderr


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupt:
    @staticmethod
    def find_spec(name, *_):
        if name == "saf.cli.console":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
runpy.run_module("saf", run_name="__main__")
"""


def test_a_command_that_is_interrupted_while_it_starts_ends_in_silence(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", INTERRUPTED_IMPORT], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_output_that_nobody_reads_ends_quietly(app: Dsn, tmp_path: Path) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": app})
    done = run(["sh", "-c", f"'{BIN}/saf' status --shards | head -1"], cwd=tmp_path)
    assert done.returncode == DONE
    assert done.stderr == ""


def test_every_setting_can_be_said_in_the_environment(tmp_path: Path, app: Dsn) -> None:
    """Each name of [forwarder], with a value of the wrong type, is heard."""
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": app})
    for name, field in Forwarder.model_fields.items():
        if field.annotation not in (int, float):
            continue
        done = saf("status", cwd=tmp_path, env={f"SAF_FORWARDER__{name.upper()}": "none"})
        assert f"forwarder.{name}" in refused(done, USAGE)


def _tables(text: str) -> list[str]:
    return [f"[{part}" for part in text.split("[")[1:]]


# The end


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [("sys.exit(3)", 3, ""), ("sys.exit()", 0, ""), ("raise OSError('broken')", 1, "broken")],
)
def test_the_process_ends_when_its_threads_and_exit_functions_have(
    last: str, code: int, said: str
) -> None:
    program = f"""
import atexit, sys, threading, time
from saf import cli

def main():
    atexit.register(print, "at exit")
    # outlives main
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    print("main")
    {last}

cli.main = main
cli.program()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "main\nthread\nat exit\n")
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


# saf itself


def test_the_version_is_that_of_the_package_with_the_schema_that_it_needs() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = saf("--version")
    assert done.returncode == DONE
    assert done.stdout == f"saf {about['version']}, schema {REVISION}\n"


def test_the_tab_key_knows_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        env = {"_SAF_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"}
        env["COMP_CWORD"] = str(len(words.split(" ")) - 1)
        return saf(env=env).stdout.split()

    assert completed("saf serv") == ["service"]
    assert "--loop" in completed("saf forward --l")
