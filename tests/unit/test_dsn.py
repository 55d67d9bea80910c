"""A dsn: what it shows of itself, and how long a connection by it waits."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from saf.database import CONNECT_TIMEOUT_SECONDS, Dsn
from saf.database.bounds import Bounds
from saf.database.dsn import SECRETS


@pytest.mark.parametrize("secret", [*SECRETS, "options"])
def test_neither_a_secret_nor_what_may_hold_one_is_shown(secret: str) -> None:
    dsn = Dsn(f"host=db dbname=app {secret}='-c app.token=hunter2'")
    assert "hunter2" not in f"{dsn} {dsn!r}"
    assert "dbname=app" in str(dsn)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_that_a_driver_quotes_is_taken_out_of_its_message(secret: str) -> None:
    dsn = Dsn(f"host=db dbname=app {secret}=hunter2")
    assert dsn.redact("no\n  hunter2 here") == "no *** here"


@pytest.mark.parametrize(
    ("dsn", "quoted"),
    [
        (r"host=db dbname=app password=a\hunter2", r"no host=db dbname=app password=a\hunter2"),
        ("postgresql://me:hunt%65r2@db/app", "no postgresql://me:hunt%65r2@db/app"),
        ("postgresql://me:hunt%65r%402@db/app", "no postgresql://me:hunter%402@db/app"),
        (r"host=db dbname=app password='hunter\'2'", r"no password='hunter\'2'"),
    ],
)
def test_a_secret_is_taken_out_of_a_message_however_it_is_written_there(
    dsn: str, quoted: str
) -> None:
    said = Dsn(dsn).redact(quoted)
    assert said.startswith("no ")
    assert "hunt" not in said


def test_a_host_that_does_not_answer_is_given_up_in_time_unless_the_dsn_says_otherwise() -> None:
    parts = conninfo_to_dict(Dsn("host=db dbname=app").for_role("mark"))
    assert int(str(parts["connect_timeout"])) == CONNECT_TIMEOUT_SECONDS
    assert int(str(parts["tcp_user_timeout"])) == Bounds().network_seconds * 1000
    patient = Dsn("host=db dbname=app connect_timeout=99 tcp_user_timeout=99").for_role("mark")
    assert conninfo_to_dict(patient)["connect_timeout"] == "99"
    assert conninfo_to_dict(patient)["tcp_user_timeout"] == "99"


@pytest.mark.parametrize(("role", "seconds"), [("read", 7), ("archive", 7), ("mark", 2)])
def test_whoever_reads_slowly_may_leave_an_answer_unread_for_long(role: str, seconds: int) -> None:
    limits = Bounds(network_seconds=2, long_seconds=7).of(role)
    assert limits is not None
    assert f"set_config('tcp_user_timeout', '{seconds}000', false)" in limits.setting()


def test_a_connection_says_what_it_is_for() -> None:
    assert "application_name='saf mark'" in Dsn("dbname=app").for_role("mark")
