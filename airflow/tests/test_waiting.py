"""The sensor and the trigger, against real databases."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from conftest import SAF, Site

from saf_airflow import Saf, SafForwardedTrigger, SafPendingTrigger
from saf_airflow.forwarded import BROKEN, WAITS, asked

SENSOR = """
SafForwardedSensor(
    task_id="wait", saf=SAF, poke_interval=1, timeout=60, deferrable={deferrable}
) >> PythonOperator(task_id="next", python_callable=print, op_args=["NEXT"])
"""


@pytest.mark.parametrize("deferrable", [False, True])
def test_the_sensor_waits_until_what_was_sent_before_the_run_is_forwarded(
    site: Site, deferrable: bool
) -> None:
    site.send()
    site.dag("sensor", SENSOR.format(deferrable=deferrable))
    with site.start("sensor") as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if "not yet: shop: pending" in line:
                break
        asyncio.run(_forward(site))
        output += process.communicate(timeout=200)[0]
    assert {state for state, _ in site.states("sensor").values()} == {"success"}, output


async def _forward(site: Site) -> None:
    process = await asyncio.create_subprocess_exec(SAF, "forward", "--config", site.config)
    assert await process.wait() == 0


def test_a_dead_letter_fails_the_sensor_at_once(site: Site) -> None:
    site.sql(
        site.shop,
        "INSERT INTO saf.dead_letter (subscription_id, shard, id, to_service, body, reason, error, "
        "created_at) SELECT subscription_id, 1, 1, 'x', '', 'rejected', 'no', now() - interval '1h'"
        " FROM saf.subscription WHERE name = 'forwarder'",
    )
    site.dag("dead", SENSOR.format(deferrable=False))
    output = site.test("dead")
    assert "a dead letter will not be forwarded before a person has decided: shop: dead" in output
    assert site.states("dead")["wait"] == ("failed", 1)


def test_the_trigger_fires_when_something_is_pending_and_again_while_it_is(site: Site) -> None:
    trigger = SafPendingTrigger(
        command=str(SAF), config=str(site.config), poll_seconds=0.1, again_seconds=0.1
    )

    async def fire() -> list[object]:
        events = trigger.run()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(3)
        assert not first.done()
        await asyncio.to_thread(site.send)
        found = [(await first).payload, (await anext(events)).payload]
        await events.aclose()
        return found

    pending = {"pending": ["shop"]}
    assert asyncio.run(asyncio.wait_for(fire(), 120)) == [pending, pending]


def test_the_trigger_goes_on_while_a_source_is_down_and_without_a_command(site: Site) -> None:
    text = site.config.read_text()
    site.config.write_text(text + '[brokers.gone]\ndsn = "host=/nonexistent dbname=gone"\n')
    site.send()
    trigger = SafPendingTrigger(command=str(SAF), config=str(site.config))
    assert asyncio.run(trigger._found()) == {"pending": ["shop"]}
    assert asyncio.run(SafPendingTrigger(command="/opt/nowhere/saf")._found()) == {}


def test_a_command_that_does_not_end_is_asked_again_and_one_that_is_missing_is_not(
    tmp_path: Path,
) -> None:
    slow = tmp_path / "saf"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    state, reason = asyncio.run(asked(Saf(command=str(slow)), ["outbox"], seconds=0.2))
    assert (state, reason) == (WAITS, f"{slow} does not answer: it has not ended within 0.2 s")
    state, reason = asyncio.run(asked(Saf(command="/opt/nowhere/saf"), ["outbox"]))
    assert (state, "cannot be started" in reason) == (BROKEN, True)


@pytest.mark.parametrize("kind", [SafPendingTrigger, SafForwardedTrigger])
def test_a_trigger_is_the_same_elsewhere(kind: type) -> None:
    extra = {"question": ["outbox"]} if kind is SafForwardedTrigger else {}
    trigger = kind(
        command="/opt/saf/bin/saf", config="x", environment={"A": "b"}, poll_seconds=7, **extra
    )
    path, arguments = trigger.serialize()
    assert path.rpartition(".")[2] == kind.__name__
    assert json.loads(json.dumps(arguments)) == arguments
    assert kind(**arguments).serialize() == trigger.serialize()


def test_an_asset_that_the_trigger_watches_starts_a_dag(site: Site) -> None:
    """The DAG is parsed with its watcher; the triggerer runs the same code as the tests above."""
    (site.folder / "dags" / "watched.py").write_text(
        "from airflow.sdk import DAG, Asset, AssetWatcher\n"
        "from saf_airflow import *\n"
        f"trigger = SafPendingTrigger(command={str(SAF)!r}, config={str(site.config)!r})\n"
        "asset = Asset('saf_pending', watchers=[AssetWatcher(name='saf', trigger=trigger)])\n"
        "with DAG('watched', schedule=[asset], max_active_runs=1):\n"
        f"    SafForwardOperator(task_id='forward', saf=Saf(command={str(SAF)!r}, "
        f"config={str(site.config)!r}))\n"
    )
    site.send(2)
    output = site.test("watched")
    assert site.stored() == 2, output
