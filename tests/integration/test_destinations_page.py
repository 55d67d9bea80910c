"""docs/destinations.md and docs/writing-a-destination.md: complete, and their examples work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saf.database import Dsn
from saf.destinations import Capabilities
from saf.destinations.kinds import GROUP, OURS, settings_of
from saf.destinations.mapping import HEADERS
from saf.destinations.settings import DestinationSettings
from tests.broker_server import SECRET
from tests.endpoints import Partner, end, serving
from tests.kafka_server import KafkaQueue, KafkaServer
from tests.nats_server import nats_server
from tests.pages import page
from tests.pipeline import connect
from tests.pipeline import send as send_one
from tests.programs import BIN, ROOT, activated, last_json, run, saf, send
from tests.rabbitmq_server import Queues, RabbitmqServer
from tests.redis_server import redis_server

pytestmark = pytest.mark.full

PAGE = page("destinations.md") + page("writing-a-destination.md")


def block(name: str) -> str:
    (text,) = re.findall(rf"<!-- test: {re.escape(name)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert isinstance(text, str)
    return text


def section(title: str) -> str:
    return PAGE.partition(f"# {title}\n")[2].partition("\n#")[0]


def named(title: str) -> set[str]:
    """The names in the first column of a section's tables."""
    cells = re.findall(r"^\|([^|]*)\|", section(title), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_each_kind_and_each_setting_has_its_line() -> None:
    common = named("Settings")
    assert common == set(DestinationSettings.model_fields)
    assert named("Kinds") == set(OURS)
    for kind in OURS:
        assert named(kind) == set(settings_of(kind).model_fields) - common


def test_each_capability_is_told_and_each_kinds_are_true() -> None:
    told = re.findall(r"^\| `(\w+)`", section("Capabilities of a kind"), re.MULTILINE)
    assert told == [*Capabilities.__dataclass_fields__]
    for kind in OURS:
        can = settings_of(kind).capabilities
        (row,) = re.findall(rf"^\| `{kind}` \|[^|]*\|(.*)\|$", section("Kinds"), re.MULTILINE)
        said = [cell.strip().startswith("yes") for cell in row.split("|")]
        assert said == [can.exactly_once, can.fences, can.knows_services, can.reads_back]


def test_each_header_of_a_message_has_its_line() -> None:
    rows = re.findall(
        r"^\| `(saf-[\w-]+)` \| `(\w+)`", section("What a queue receives"), re.MULTILINE
    )
    assert rows == [(one.saf, one.event) for one in HEADERS]


def test_its_commands_forward_to_streams_that_a_consumer_group_reads(
    app: Dsn, tmp_path: Path
) -> None:
    bodies = send(app, 60)
    (tmp_path / "saf.toml").write_text(block("redis.toml"))
    (tmp_path / "consumer.py").write_text(block("consumer.py"))
    with redis_server(tmp_path / "redis") as server:
        env = {"SHOP_DSN": app.conninfo, "REDIS": server.address}
        path = activated()
        done = run(["bash", "-euxc", block("redis.sh")], env={**env, "PATH": path}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "promise: exactly once; a crash of the process or of the machine loses nothing" in (
            done.stdout
        )
        read = run([sys.executable, "consumer.py", server.address], env=env, cwd=tmp_path)
        assert read.returncode == 0, read.stderr
        lines = [line.split(" ", 1) for line in read.stdout.splitlines()]
        assert sorted(body for _, body in lines) == sorted(bodies)
        again = run([sys.executable, "consumer.py", server.address], env=env, cwd=tmp_path)
        assert (again.returncode, again.stdout) == (0, "")

        # the rights that it lists are enough for each command
        client = server.client()
        client.execute_command(*block("acl").split(), "+config|get", "+smembers")
        client.execute_command("ACL", "SETUSER", "saf", "+xrange", "+xinfo|stream", "+scan")
        text = (tmp_path / "saf.toml").read_text()
        (tmp_path / "saf.toml").write_text(
            text.replace("topic =", 'username = "saf"\npassword = "secret"\ntopic =')
        )
        send(app, 5)
        for command in (["destination", "check", "events"], ["forward"], ["reconcile"]):
            said = saf(*command, env=env, cwd=tmp_path)
            assert said.returncode == 0, said.stdout + said.stderr


def test_its_commands_forward_to_a_table_that_duckdb_reads(app: Dsn, tmp_path: Path) -> None:
    send(app, 60)
    with connect(app) as connection:
        for amount in (1.5, 2.5):
            send_one(connection, json.dumps({"amount": amount}))
    (tmp_path / "saf.toml").write_text(block("delta.toml"))
    (tmp_path / "consumer.py").write_text(block("consumer_delta.py"))
    env = {"SHOP_DSN": app.conninfo, "PATH": activated()}
    done = run(["bash", "-euxc", block("delta.sh")], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "promise: exactly once; a crash of the process or of the machine loses nothing" in (
        done.stdout
    )
    assert "1 file, 0.0 MiB; removed 0 files not needed for 168 hours" in done.stdout
    read = run([sys.executable, "consumer.py", "messages"], env=env, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    (line,) = read.stdout.splitlines()
    assert line.split(" ", 1)[1] == "billing 62 4.0"
    said = saf("lake", "optimize", "lake", "--dry-run", "--json", env=env, cwd=tmp_path)
    assert (last_json(said.stdout)["files_before"], said.returncode) == (1, 0)


def test_its_commands_forward_to_an_iceberg_table_that_duckdb_reads(
    app: Dsn, tmp_path: Path
) -> None:
    send(app, 60)
    with connect(app) as connection:
        for amount in (1.5, 2.5):
            send_one(connection, json.dumps({"amount": amount}))
    (tmp_path / "saf.toml").write_text(block("iceberg.toml"))
    (tmp_path / "consumer.py").write_text(block("consumer_iceberg.py"))
    env = {"SHOP_DSN": app.conninfo, "PATH": activated()}
    done = run(["bash", "-euxc", block("iceberg.sh")], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no Iceberg table yet, shop.messages, by a catalog in SQLite" in done.stdout
    assert "promise: exactly once; a crash of the process or of the machine loses nothing" in (
        done.stdout
    )
    read = run([sys.executable, "consumer.py", "lake"], env=env, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    assert read.stdout.splitlines() == ["billing 62 4.0"]
    checked = saf("destination", "check", "lake", env=env, cwd=tmp_path)
    assert "Iceberg table of 1 files, 1 snapshots, shop.messages" in checked.stdout
    optimized = saf("lake", "optimize", "lake", env=env, cwd=tmp_path)
    assert optimized.returncode == 2
    assert "of kind 'iceberg'" in optimized.stderr


def test_its_commands_forward_to_topics_that_a_consumer_reads(
    app: Dsn, tmp_path: Path, running_kafka: KafkaServer
) -> None:
    KafkaQueue(server=running_kafka, prefix="orders.").empty()
    KafkaQueue(server=running_kafka, prefix="saf.marks").empty()
    bodies = send(app, 60)
    (tmp_path / "saf.toml").write_text(block("kafka.toml"))
    (tmp_path / "consumer.py").write_text(block("consumer_kafka.py"))
    env = {"SHOP_DSN": app.conninfo, "KAFKA": running_kafka.address}
    path = activated()
    done = run(["bash", "-euxc", block("kafka.sh")], env={**env, "PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "topic saf.marks, which is made at the first message" in done.stdout
    assert "promise: exactly once" in done.stdout
    assert "librdkafka" not in done.stderr
    assert "%3|" not in done.stderr
    read = run([sys.executable, "consumer.py", running_kafka.address], env=env, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    lines = [line.split(" ", 1) for line in read.stdout.splitlines()]
    assert sorted(body for _, body in lines) == sorted(bodies)
    assert len({message_id for message_id, _ in lines}) == len(bodies)


def test_its_commands_forward_to_a_stream_that_a_consumer_reads(app: Dsn, tmp_path: Path) -> None:
    bodies = send(app, 60)
    (tmp_path / "saf.toml").write_text(block("nats.toml"))
    (tmp_path / "consumer.py").write_text(block("consumer_nats.py"))
    with nats_server(tmp_path / "nats") as server:
        env = {"SHOP_DSN": app.conninfo, "NATS": server.address}
        path = activated()
        done = run(["bash", "-euxc", block("nats.sh")], env={**env, "PATH": path}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "which is made at the first message" in done.stdout
        assert "promise: exactly once" in done.stdout
        read = run([sys.executable, "consumer.py", server.address], env=env, cwd=tmp_path)
        assert read.returncode == 0, read.stderr
        lines = [line.split(" ", 1) for line in read.stdout.splitlines()]
        assert sorted(body for _, body in lines) == sorted(bodies)
        again = run([sys.executable, "consumer.py", server.address], env=env, cwd=tmp_path)
        assert (again.returncode, again.stdout) == (0, "")

        # the rights that it lists are enough for each command
        server.kill()
        server.settings["authorization"] = block("nats.conf")
        server.start()
        text = (tmp_path / "saf.toml").read_text()
        (tmp_path / "saf.toml").write_text(
            text.replace("topic =", 'username = "saf"\npassword = "secret"\ntopic =')
        )
        send(app, 5)
        for command in (["destination", "check", "events"], ["forward"], ["reconcile"]):
            said = saf(*command, env=env, cwd=tmp_path)
            assert said.returncode == 0, said.stdout + said.stderr


def test_its_commands_forward_to_streams_that_a_consumer_reads(
    app: Dsn, rabbitmq: RabbitmqServer, tmp_path: Path
) -> None:
    bodies = send(app, 60)
    (tmp_path / "saf.toml").write_text(block("rabbitmq_stream.toml"))
    (tmp_path / "consumer.py").write_text(block("consumer_rabbitmq_stream.py"))
    env = {"SHOP_DSN": app.conninfo, "RABBITMQ": rabbitmq.address}
    path = activated()
    script = block("rabbitmq_stream.sh")
    done = run(["bash", "-euxc", script], env={**env, "PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "whose streams are made at the first message" in done.stdout
    assert "promise: exactly once" in done.stdout
    consumer = subprocess.Popen(
        [sys.executable, "consumer.py", "127.0.0.1", str(rabbitmq.port)],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert consumer.stdout is not None
        lines = [consumer.stdout.readline().rstrip("\n").split(" ", 1) for _ in bodies]
    finally:
        consumer.kill()
        consumer.communicate()
    assert sorted(body for _, body in lines) == sorted(bodies)
    said = saf("destination", "check", "events", env=env, cwd=tmp_path)
    assert "a crash of its process loses nothing that was acknowledged" in said.stdout


def test_its_commands_forward_to_a_queue_that_a_consumer_reads(
    app: Dsn, rabbitmq_queues: Queues, tmp_path: Path
) -> None:
    bodies = send(app, 60)
    (tmp_path / "saf.toml").write_text(block("rabbitmq.toml"))
    (tmp_path / "consumer.py").write_text(block("consumer_rabbitmq.py"))
    rabbitmq_queues.topics = ("orders.billing",)
    rabbitmq_queues.empty()
    env = {"SHOP_DSN": app.conninfo, "RABBITMQ": rabbitmq_queues.address}
    path = activated()
    script = block("rabbitmq.sh")
    done = run(["bash", "-euxc", script], env={**env, "PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "promise: at least once; a durable queue confirms" in done.stdout
    command = [sys.executable, "consumer.py", rabbitmq_queues.address]
    read = run(command, env=env, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    lines = [line.split(" ", 1) for line in read.stdout.splitlines()]
    assert sorted(body for _, body in lines) == sorted(bodies)
    again = run(command, env=env, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, "")


def test_its_commands_forward_to_a_broker_behind_a_url(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = send(app, 60)
    (tmp_path / "saf.toml").write_text(block("https.toml"))
    monkeypatch.setenv("MOM_DSN", mom.conninfo)
    monkeypatch.setenv("SHOP_SECRET", SECRET)
    names: dict[str, Any] = {}
    exec(block("partners.py"), names)  # noqa: S102 - the page's own
    assert "uvicorn partners:app" in block("https_there.sh")
    with serving(Partner(), names["app"]) as partner:
        env = {"SHOP_DSN": app.conninfo, "PARTNER": partner.url, "SHOP_SECRET": SECRET}
        path = activated()
        done = run(["bash", "-euxc", block("https.sh")], env={**env, "PATH": path}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"destination 'partner': PostgreSQL {mom_version(mom)}" in done.stdout
        assert f"at {partner.url}" in done.stdout
        assert "promise: exactly once; a crash of the process or of the machine loses nothing" in (
            done.stdout
        )
        found = saf("reconcile", env=env, cwd=tmp_path)
        assert "kind, 'https', cannot be read back" in found.stdout
    end(names["app"])
    with connect(mom) as connection:
        there = connection.execute("SELECT body FROM saf.inbox ORDER BY id").fetchall()
    assert sorted(bytes(body).decode() for (body,) in there) == sorted(bodies)
    gone = saf("destination", "check", "partner", env=env, cwd=tmp_path)
    assert gone.returncode == 75
    assert "Connection refused" in gone.stderr
    wrong = saf("forward", env={**env, "SHOP_SECRET": "hunter2-canary"}, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "destinations.partner.secret: a webhook's secret is whsec_" in wrong.stderr
    assert "hunter2" not in wrong.stderr


def mom_version(mom: Dsn) -> str:
    with connect(mom) as connection:
        ((version,),) = connection.execute("SHOW server_version").fetchall()
    return str(version)


def test_its_commands_forward_to_a_folder(app: Dsn, tmp_path: Path) -> None:
    bodies = send(app, 60)
    (tmp_path / "saf.toml").write_text(block("toml"))
    done = run(
        ["bash", "-euxc", block("shell")],
        env={"PATH": activated(), "SHOP_DSN": app.conninfo},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for key in {line["key"] for line in lines}:
        mine = [line["body"] for line in lines if line["key"] == key]
        assert mine == [body for body in bodies if body in mine]
    assert sorted(line["body"] for line in lines) == sorted(bodies)
    assert set(lines[0]) == set(json.loads(block("line"))) - {"headers"}  # these have none
    found = saf("reconcile", "--json", env={"SHOP_DSN": app.conninfo}, cwd=tmp_path)
    (outcome,) = json.loads(found.stdout)["brokers"]
    assert (outcome["same"], outcome["unread"]) == (True, {})

    # and what commands say of a folder that others have read, or that is not there
    for file in (tmp_path / "lake").glob("*/*.jsonl"):
        file.unlink()
    env = {"SHOP_DSN": app.conninfo}
    said = saf("reconcile", env=env, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "destination 'lake' was not compared: " in said.stdout
    assert "60 messages were not compared" in said.stdout
    again = saf("replay", "--dry-run", env=env, cwd=tmp_path)
    assert "nothing lost; nothing to lake, which was not compared: " in again.stdout
    status = saf("status", "--json", env=env, cwd=tmp_path)
    assert status.returncode == 0, status.stderr
    assert "no destination of saf.toml is a broker" in (
        saf("service", "create", "x", env=env, cwd=tmp_path).stderr
    )
    assert "of kind 'jsonl' is not a broker" in (
        saf("dialog", "list", "--broker", "lake", env=env, cwd=tmp_path).stderr
    )
    well = json.loads(saf("doctor", "--json", env=env, cwd=tmp_path).stdout)["findings"]
    there = [(one["check"], one["severity"]) for one in well if "lake" in one["where"]]
    assert there == [("reachable", "ok")]
    (tmp_path / "lake").rename(tmp_path / "away")
    doctor = saf("doctor", env=env, cwd=tmp_path)
    assert doctor.returncode != 0
    shown = " ".join(doctor.stdout.split())
    gone = r"error: destination 'lake': .*No such file or directory.*\[reachable\]"
    assert re.search(gone + r" fix: make it reachable, or correct \[destinations\.lake\]", shown)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's package, installed."""
    (tmp_path / "paper_outbox.py").write_text(block("paper_outbox.py"))
    (tmp_path / "test_paper.py").write_text(block("test_paper.py"))
    info = tmp_path / "paper_outbox-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper-outbox\nVersion: 1.0\n")
    assert f'[project.entry-points."{GROUP}"]' in block("pyproject.toml")
    (declared,) = re.findall(r'^(\w+) = "(.*)"$', block("pyproject.toml"), re.MULTILINE)
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{' = '.join(declared)}\n")
    return tmp_path


@pytest.mark.slow
def test_a_kind_of_ones_own_passes_the_suite_and_is_forwarded_to(app: Dsn, package: Path) -> None:
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_paper.py"],
        cwd=package, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=200,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout
    assert "skipped" not in tested.stdout
    bodies = send(app, 20)
    paper = package / "paper.txt"
    (package / "saf.toml").write_text(
        f'[brokers.shop]\ndsn = "${{SHOP_DSN}}"\n[destinations.p]\nkind = "paper"\n'
        f'file = "{paper}"\n[forwarder]\ndefault_destination = "p"\n'
    )
    env = {"SHOP_DSN": app.conninfo, "PYTHONPATH": f"{package}:{ROOT}"}
    done = subprocess.run(
        [BIN / "saf", "forward"], cwd=package, env={**os.environ, **env}, timeout=200,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [bytes.fromhex(line.split()[1]).decode() for line in paper.read_text().splitlines()]
    assert sorted(printed) == sorted(bodies)
    with connect(app) as connection:
        assert connection.execute("SELECT FROM saf.parked").fetchall() == []
    refused = subprocess.run(
        [BIN / "saf", "route", "add", "p", "--quality", "exactly_once"], cwd=package,
        env={**os.environ, **env}, timeout=200, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "of kind 'paper' cannot store exactly once" in refused.stderr
