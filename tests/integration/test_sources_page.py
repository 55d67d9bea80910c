"""docs/sources.md: its settings and commands work, and it names each kind and each refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from saf import errors
from saf.database import Dsn
from saf.sources.kinds import OURS
from tests.nats_server import nats_server
from tests.pages import page
from tests.pipeline import bodies
from tests.programs import activated, run
from tests.rabbitmq_server import Queues, RabbitmqServer
from tests.redis_server import RedisServer
from tests.topics import TOPIC, add, add_to_nats, amqp_of, texts, with_ids

PAGE = page("sources.md")


def block(name: str) -> str:
    (text,) = re.findall(rf"<!-- test: {re.escape(name)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert isinstance(text, str)
    return text


def test_each_kind_and_each_refusal_is_told() -> None:
    table = PAGE.partition("| kind |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(OURS)
    table = PAGE.partition("| error |")[2].partition("\n\n")[0]
    refused = {name.__name__ for name in errors.SourceRefused.__subclasses__()}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == refused


@pytest.mark.slow
def test_its_commands_read_a_topic(mom: Dsn, queue: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "saf.toml").write_text(block("sources.toml"))
    add(queue, "1", "2", order="A-1")
    env = {"MOM_DSN": mom.conninfo, "REDIS": queue.address, "PATH": activated()}
    done = run(["sh", "-ec", block("sources.sh")], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "received 2 messages (payments: 2)" in done.stdout
    assert "pending: 0" in done.stdout
    assert bodies(mom) == ["1", "2"]
    done = run(["sh", "-ec", block("reconcile.sh")], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 compared" in done.stdout


@pytest.mark.slow
def test_its_settings_of_nats_read_a_stream(mom: Dsn, tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        add_to_nats(server, texts(["1", "2"]))
        reads(tmp_path, mom, "nats.toml", NATS=server.address)


@pytest.mark.slow
def test_its_settings_of_rabbitmq_read_a_stream(
    mom: Dsn, rabbitmq: RabbitmqServer, tmp_path: Path
) -> None:
    rabbitmq.publish(TOPIC, [*map(amqp_of, texts(["1", "2"]))])
    reads(tmp_path, mom, "rabbitmq_stream.toml", RABBITMQ=rabbitmq.address)


@pytest.mark.slow
def test_its_settings_of_rabbitmq_read_a_queue(
    mom: Dsn, rabbitmq_queues: Queues, tmp_path: Path
) -> None:
    rabbitmq_queues.delete(TOPIC)
    rabbitmq_queues.publish(TOPIC, with_ids(["1", "2"]))
    reads(tmp_path, mom, "rabbitmq.toml", RABBITMQ=rabbitmq_queues.address)


def reads(folder: Path, mom: Dsn, settings: str, **env: str) -> None:
    """Run the commands of the page with other settings of it; two messages are read."""
    (folder / "saf.toml").write_text(block(settings))
    done = run(
        ["sh", "-ec", block("sources.sh")],
        env={"MOM_DSN": mom.conninfo, "PATH": activated(), **env},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "received 2 messages (payments: 2)" in done.stdout
    assert bodies(mom) == ["1", "2"]


@pytest.mark.slow
def test_its_decisions_continue_a_topic_that_was_made_again(
    mom: Dsn, queue: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "saf.toml").write_text(block("sources.toml"))
    env = {"MOM_DSN": mom.conninfo, "REDIS": queue.address, "PATH": activated()}

    def shell(script: str) -> str:
        done = run(["sh", "-c", script], env=env, cwd=tmp_path)
        return done.stdout + done.stderr

    add(queue, "1", "2")
    shell("saf service create billing --broker mom && saf forward")
    for command, expected in zip(
        block("continue.sh").splitlines(), (["1", "2", "3"], ["1", "2", "3"]), strict=True
    ):
        queue.client().delete("payments")
        add(queue, "3")
        assert "deleted or made again" in shell("saf forward")
        assert "continues with" in shell(command)
        shell("saf forward")
        assert bodies(mom) == expected
