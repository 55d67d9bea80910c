"""``saf demo`` as a newcomer runs it: once, again, and after it was killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn
from saf.errors import Unavailable
from saf_demo.command import Kind, Topics
from saf_demo.flights import read
from saf_demo.kinds import KINDS
from saf_demo.proof import Proof, prove, stored
from saf_demo.stage import WRITERS
from tests import programs
from tests.needed import absent
from tests.programs import BIN, environment
from tests.tiers import FULL, TIER, sized
from tests.waits import until

FLIGHTS = sized(1_000, 5_000)
QUEUES = ("redis", "kafka", "delta", "nats", "rabbitmq", "rabbitmq_stream", "iceberg")
"""A run takes a JVM, so the gate has a server, one with its own JVM, and a table."""
DEADLINE_SECONDS = 240
LINE = {
    *(field.name for field in fields(Proof)),
    *("stores", "messages_per_second", "written_now", "forwarded_now", "seconds"),
    *("transactions_rolled_back_now", "postgresql", "java"),
}
"""What the line of JSON has, wherever the flights are sent to."""
MISSING = re.compile(r"saf: (?P<server>.+) is missing on this machine: (?P<install>[^,\n]+)")


pytestmark = pytest.mark.timeout(600)  # up to two runs of everything


@pytest.fixture
def folder() -> Iterator[Path]:
    # not tmp_path, whose name is too long for a unix socket
    folder = Path(tempfile.mkdtemp(prefix="saf-demo-"))
    yield folder
    # a killed demo has left its server behind; entering stops that one
    with EmbeddedServer(folder / "postgres"):
        pass
    shutil.rmtree(folder)


def command(folder: Path, *more: str) -> list[str | Path]:
    return [BIN / "saf", "demo", "--json", "--data", folder, "--limit", str(FLIGHTS), *more]


def run(folder: Path, *more: str) -> dict[str, Any]:
    done = programs.run(command(folder, *more), timeout=DEADLINE_SECONDS)
    if missing := MISSING.search(done.stderr):
        absent(missing["server"], missing["install"])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    return programs.last_json(done.stdout)


def is_right(result: dict[str, Any]) -> bool:
    wrong = ("lost", "misrouted", "duplicated", "out_of_order", "changed", "not_sent", "not_atomic")
    counts = [result["sent"], result["forwarded"], *(result[name] for name in wrong)]
    return counts == [FLIGHTS, FLIGHTS, *[0] * len(wrong)]


@pytest.mark.full
@pytest.mark.parametrize("queue", QUEUES[: sized(2, len(QUEUES))])
def test_to_a_queue_it_is_proven_by_what_the_queue_holds(folder: Path, queue: str) -> None:
    first = run(folder, "--to", queue)
    assert is_right(first), first
    assert first["stores"] == {queue: FLIGHTS}
    assert set(first) == LINE
    if queue != "redis" and TIER != FULL:
        return
    second = run(folder, "--to", queue)  # its server has kept its data
    assert is_right(second), second
    assert second["forwarded_now"] == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", [*Topics])
def test_through_a_topic_it_is_proven_by_what_the_store_holds(folder: Path, kind: Topics) -> None:
    first = run(folder, "--through", kind)
    assert is_right(first), first
    assert first["stores"] == {f"{kind}_store": FLIGHTS}
    assert set(first) == LINE
    if TIER != FULL:
        return
    second = run(folder, "--through", kind)
    assert is_right(second), second
    assert second["forwarded_now"] == 0


@pytest.mark.full
def test_every_flight_arrives_once_in_order_and_a_second_run_forwards_nothing(
    folder: Path,
) -> None:
    first = run(folder)
    assert is_right(first), first
    assert first["written_now"] == first["forwarded_now"] == FLIGHTS
    assert first["messages_per_second"] > 0
    # each writer rolled back every 20th of its 200 transactions of one flight
    assert first["transactions_rolled_back_now"] >= 10 * WRITERS
    assert first["rolled_back"] >= first["transactions_rolled_back_now"]

    second = run(folder)
    assert is_right(second), second
    assert second["written_now"] == second["forwarded_now"] == 0
    assert second["rolled_back"] == first["rolled_back"]


@pytest.mark.full
def test_as_webhooks_it_is_proven_by_what_the_receiver_has(folder: Path) -> None:
    first = run(folder, "--http")
    assert is_right(first), first
    assert first["stores"] == {"webhooks": FLIGHTS}
    assert set(first) == LINE
    if TIER != FULL:
        return
    second = run(folder, "--http")  # the receiver has kept what it has taken
    assert is_right(second), second
    assert second["forwarded_now"] == 0


@pytest.mark.full
def test_a_stream_into_a_lake_that_is_killed_in_the_middle_brings_every_flight_once(
    folder: Path,
) -> None:
    first = run(folder, "--lake")
    assert is_right(first), first
    assert (first["streamed_now"], first["killed_now"]) == (FLIGHTS, 1)
    assert first["delay_minutes"]["sent"] == first["delay_minutes"]["in_the_table"] > 0
    assert 0 < first["largest_lag"] <= FLIGHTS
    assert Path(first["chart"]).read_bytes().startswith(b"\x89PNG")
    if TIER != FULL:
        return
    second = run(folder, "--lake")
    assert is_right(second), second
    assert (second["streamed_now"], second["killed_now"]) == (0, 0)


@pytest.mark.full
def test_with_routing_each_flight_arrives_once_at_the_store_of_its_airport(folder: Path) -> None:
    origins = Counter(flight["origin"] for flight in islice(read(), FLIGHTS))
    for written in (FLIGHTS, 0)[: sized(1, 2)]:
        result = run(folder, "--routing")
        assert is_right(result), result
        assert result["stores"] == dict(origins)
        assert result["forwarded_now"] == written


@pytest.mark.full
def test_a_shop_and_a_warehouse_talk_and_each_talk_ends_as_it_should(folder: Path) -> None:
    for _ in range(sized(1, 2)):
        done = programs.run(
            [BIN / "saf", "demo", "--dialog", "--json", "--data", folder], timeout=DEADLINE_SECONDS
        )
        assert done.returncode == 0, done.stderr
        result = programs.last_json(done.stdout)
        assert [(one["name"], one["error"]) for one in result["talks"]] == [
            ("chairs", None),
            ("pianos", 17),
            ("mermaid", -1),
            ("cupboard", None),
        ]
        assert {(one["shop"], one["right"]) for one in result["talks"]} == {("closed", True)}
        # in the order in which it was said, both sides
        script = [" ".join(line.split()[2:]) for line in done.stderr.splitlines() if " s " in line]
        for one, after in pairwise(
            [
                "chairs shop please send 10 chairs",
                "chairs warehouse here are 4, the next lorry brings more",
                "chairs warehouse here are the last 2, and goodbye",
                "chairs shop ← 2 are here; 10 by now",
                "chairs shop goodbye",
            ]
        ):
            assert script.index(one) < script.index(after)
        assert "pianos shop ← error 17: router 'trade': we do not have that many" in script
        assert "cupboard shop ← a digest: the same as ours" in script


@pytest.mark.full
@pytest.mark.parametrize(
    ("database", "table"),
    [("mom", "saf.inbox"), ("flights", "flight"), ("flights", "saf.cursor")][: sized(1, 3)],
)
def test_a_killed_run_is_finished_by_the_next(folder: Path, database: str, table: str) -> None:
    at_work = {"saf.cursor": "WHERE open IS NOT NULL"}.get(table, "")
    dsn = EmbeddedServer(folder / "postgres").dsn(database)
    with subprocess.Popen(
        command(folder), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as demo:
        until(lambda: exists(dsn, f"SELECT FROM {table} {at_work}"))
        demo.send_signal(signal.SIGKILL)
    result = run(folder)
    assert is_right(result), result


@pytest.mark.full
def test_ctrl_c_ends_in_order_and_the_next_run_goes_on(folder: Path) -> None:
    dsn = EmbeddedServer(folder / "postgres").dsn("flights")
    with subprocess.Popen(
        command(folder),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as demo:
        until(lambda: exists(dsn, "SELECT FROM flight"))
        os.killpg(demo.pid, signal.SIGINT)  # a terminal sends it to all
        _, said = demo.communicate()
    assert demo.returncode == 130
    assert "Traceback" not in said
    with pytest.raises(Unavailable):
        dsn.connect(role="test")
    result = run(folder)
    assert is_right(result), result


def test_the_proof_notices_what_it_is_there_for(
    new_broker: Callable[[str], Dsn],
) -> None:
    application, mom = new_broker("application"), new_broker("mom")
    with application.connect(role="test") as connection:
        connection.execute("CREATE TABLE flight (number int, message_id uuid)")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body)"
            " SELECT 's', 'k', convert_to(n::text, 'UTF8') FROM generate_series(1, 5) AS n"
        )
        connection.execute("INSERT INTO flight SELECT id, message_id FROM saf.outbox WHERE id < 5")
        sent = connection.execute("SELECT message_id, body FROM saf.outbox ORDER BY id").fetchall()
        connection.commit()
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('s', '')")
        connection.rollback()
    one, two, three, four, _ = sent
    # 3 before 2; 2 twice; 4 changed; 5 lost; one that was never sent
    arrived = [one, three, two, two, (four[0], b"other"), (uuid4(), b"x")]
    with mom.connect(role="test") as connection:
        connection.cursor().executemany(
            "INSERT INTO saf.inbox (message_id, body, to_service, key) VALUES (%s, %s, 's', 'k')",
            arrived,
        )
    proof = prove(application, stored(mom))
    assert not proof.holds
    assert (proof.sent, proof.forwarded, proof.lost, proof.duplicated) == (5, 6, 1, 1)
    assert (proof.out_of_order, proof.changed, proof.not_sent) == (2, 1, 1)
    assert (proof.not_atomic, proof.rolled_back) == (1, 1)


def test_each_kind_that_the_command_offers_has_a_plug() -> None:
    assert {*KINDS} == {*QUEUES} == {*Kind} - {Kind.POSTGRESQL}


def exists(dsn: Dsn, query: str) -> bool:
    """Whether a row is there; not if the server or the table is not."""
    try:
        with dsn.connect(role="test") as connection:
            return connection.execute(f"{query} LIMIT 1").fetchone() is not None
    except (Unavailable, psycopg.errors.UndefinedTable):
        return False
