"""SafForwardOperator, by ``airflow dags test`` on SQLite, against two databases."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from conftest import AIRFLOW, SAF, Site, saf, until

FORWARD = (
    "SafForwardOperator(task_id='forward', saf=SAF, retries=1, retry_delay=timedelta(0){more})"
)

SHOW = """
forward = {forward}
def show(said):
    print("SAID", said["forwarded"], said["by_service"])
show = PythonOperator(task_id="show", python_callable=show, op_args=[forward.output])
"""


def forward(more: str = "") -> str:
    return FORWARD.format(more=f", {more}" if more else "")


def test_what_is_pending_is_forwarded_and_the_next_task_gets_the_json(site: Site) -> None:
    site.send(3)
    site.dag("ok", SHOW.format(forward=forward()))
    output = site.test("ok")
    assert "SAID 3 {'mom': {'billing': 3}}" in output
    assert site.stored() == 3
    assert {state for state, _ in site.states("ok").values()} == {"success"}
    assert site.asset_events() == [
        ("saf://mom/", {"messages": 3}),
        ("saf://mom/billing", {"messages": 3}),
    ]


def test_a_run_that_finds_nothing_succeeds_without_an_event_or_is_skipped(site: Site) -> None:
    """Messages that a killed run has stored count as arrived in the next run."""
    site.dag("nothing", forward())
    site.test("nothing")
    assert site.states("nothing")["forward"][0] == "success"
    assert site.asset_events() == []
    site.dag("skipped", forward("skip_if_nothing=True"))
    site.test("skipped")
    assert site.states("skipped")["forward"][0] == "skipped"
    saf("service", "create", "parts/small", "--config", site.config)
    site.send(2, service="parts/small")
    subprocess.run(
        [SAF, "forward", "--config", site.config],
        env={**site.environment, "SAF_FAILPOINT": "mom_commit"},
        start_new_session=True,  # the failpoint kills its process group
        check=False,
    )
    assert site.stored() == 2
    site.test("skipped")
    assert site.states("skipped")["forward"][0] == "success"
    assert site.asset_events() == [
        ("saf://mom/", {"messages": 2}),
        ("saf://mom/parts%2Fsmall", {"messages": 2}),
    ]


def test_a_destination_that_is_down_is_tried_again(site: Site) -> None:
    site.send()
    text = site.config.read_text().replace(json.dumps(site.mom), '"host=/nonexistent dbname=gone"')
    site.config.write_text(text)
    site.dag("down", forward())
    output = site.test("down")
    assert "exit code 75: a database does not answer, and nothing is lost" in output
    assert site.states("down")["forward"] == ("failed", 2)
    assert "/nonexistent" in output


def test_what_has_arrived_although_another_destination_is_down_has_its_events_if_you_say_so(
    site: Site,
) -> None:
    site.config.write_text(
        site.config.read_text().replace(
            "[forwarder]", '[destinations.gone]\ndsn = "host=/nonexistent dbname=gone"\n[forwarder]'
        )
    )
    saf("route", "add", "gone", "--service", "lost", "--config", site.config)
    site.send()
    site.send(service="lost")
    site.dag("part", forward("succeed_in_part=True"))
    output = site.test("part")
    assert "exit code 75, and only in part: " in output
    assert site.states("part")["forward"] == ("success", 1)
    assert site.asset_events() == [
        ("saf://mom/", {"messages": 1}),
        ("saf://mom/billing", {"messages": 1}),
    ]
    site.test("part")
    assert site.states("part")["forward"][0] == "failed", "nothing has arrived"


def test_a_broken_configuration_fails_at_once(site: Site) -> None:
    site.config.write_text("[brokers.shop]\nhost = 7\n")
    site.dag("broken", forward())
    output = site.test("broken")
    assert "exit code 2: an operator must fix something" in output
    assert site.states("broken")["forward"] == ("failed", 1)


def test_a_command_that_is_not_there_fails_at_once_and_says_where_it_was_looked_for(
    site: Site,
) -> None:
    site.dag("missing", forward().replace("saf=SAF", "saf=Saf(command='/opt/nowhere/saf')"))
    assert "/opt/nowhere/saf cannot be started: No such file" in site.test("missing")
    assert site.states("missing")["forward"] == ("failed", 1)


def test_a_connection_says_where_saf_is(site: Site) -> None:
    site.send()
    extra = {"command": str(SAF), "config": str(site.config)}
    site.dag("connected", forward().replace("saf=SAF", "saf_conn_id='saf'"))
    connection = json.dumps({"conn_type": "generic", "extra": extra})
    with subprocess.Popen(
        [str(AIRFLOW), "dags", "test", "connected"],
        env={**site.environment, "AIRFLOW_CONN_SAF": connection},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        process.wait(300)
    assert site.stored() == 1


def test_a_task_that_takes_too_long_ends_the_command_and_the_next_run_loses_nothing(
    site: Site,
) -> None:
    site.send(5)
    with site.locked():
        site.dag(
            "slow",
            forward("stop_seconds=1, execution_timeout=timedelta(seconds=8)").replace(
                "retries=1", "retries=0"
            ),
        )
        site.test("slow")
        assert site.states("slow")["forward"][0] == "failed"
        assert not site.forwarders()
    site.dag("after", forward())
    site.test("after")
    assert site.stored() == 5


def test_a_task_that_is_killed_in_the_middle_ends_the_command_with_all_that_it_has_started(
    site: Site,
) -> None:
    site.send(5)
    with site.locked():
        site.dag("killed", forward("stop_seconds=1"))
        with site.start("killed") as process:
            until(site.forwarders)
            until(site.blocked)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
        assert not site.forwarders()
    site.dag("after", forward())
    site.test("after")
    assert site.stored() == 5


def test_a_try_whose_command_is_stopped_before_its_end_is_tried_again(site: Site) -> None:
    site.config.write_text(site.config.read_text() + "chunk_rows = 2\n")
    site.send(5)
    site.dag("stopped", forward())
    with site.locked():
        process = site.start("stopped")
        until(site.blocked)
        for pid in site.forwarders():
            os.kill(pid, signal.SIGTERM)
        until(lambda: site.sql(site.shop, "SELECT 1 FROM saf.member WHERE stopping"))
    output, _ = process.communicate(timeout=300)
    assert "saf was stopped before its end; what is left waits" in output
    assert site.states("stopped")["forward"] == ("success", 2), output
    assert site.stored() == 5
