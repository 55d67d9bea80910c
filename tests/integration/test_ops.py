"""ops/: rules that promtool accepts and a real Prometheus fires, runbooks, a dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from saf.database import Dsn
from saf.telemetry.metrics import METRICS
from saf_demo.servers import free_port
from tests.needed import needed
from tests.pages import page
from tests.pipeline import connect
from tests.programs import ROOT, configuration, run
from tests.prometheus_server import RULES, get, prometheus, started
from tests.waits import until

DASHBOARD = ROOT / "ops" / "grafana" / "saf.json"
BY_NAME = {one.name: one for one in METRICS}
SUFFIXES = ("_bucket", "_sum", "_count")

DEAD = """
INSERT INTO saf.dead_letter (subscription_id, shard, id, to_service, body, reason, error)
VALUES (1, 1, 1, 'billing', '', 'rejected', 'no')
"""
OLD = """
INSERT INTO saf.outbox (to_service, body, created_at) VALUES ('billing', '', now() - interval '1 h')
"""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def metrics_of(expression: str) -> Iterator[tuple[str, str]]:
    """Each metric that an expression asks for, and what it says of its labels."""
    for name, labels in re.findall(r"\b(saf_[a-z_]+)(?:\{([^}]*)\})?", expression):
        yield next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name), labels


def check(expression: str) -> None:
    """Raise unless an expression asks for what there is."""
    asked = [*metrics_of(expression)]
    assert asked, expression
    for name, labels in asked:
        assert name in BY_NAME, name
        named = {*re.findall(r"(\w+)\s*[=!]", labels)} - {"instance"}
        assert named <= {*BY_NAME[name].labels}, expression
    if grouped := re.search(r"by \(([\w, ]+)\)", expression):
        all_labels = {label for name, _ in asked for label in BY_NAME[name].labels}
        assert {*grouped[1].split(", ")} - {"le"} <= all_labels, expression


def test_promtool_accepts_the_rules() -> None:
    done = run([needed("promtool", "prometheus"), "check", "rules", RULES])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_dead_letters_from_before_an_outage_are_no_news_and_those_of_meanwhile_are(
    tmp_path: Path,
) -> None:
    """An hour, half an hour without figures, and an hour: which brokers' letters are news then."""
    here, gone, down = "1x150", "1x60 stale _x29 1x60", "1x60 0x29 1x60"
    figures = {
        "same": (gone, "3x60 stale _x29 3x60"),
        "down": (down, "3x60 stale _x29 3x60"),
        "less": (gone, "3x60 stale _x29 2x60"),
        "more": (gone, "3x60 stale _x29 4x60"),
        "first": (here, "_x93 1x60"),
        "again": (here, "5x30 stale _x62 2x60"),
    }
    series = []
    for broker, (up, letters) in figures.items():
        labels = f'broker="{broker}", subscription="billing", reason="rejected"'
        series.append({"series": f'saf_up{{broker="{broker}"}}', "values": up})
        series.append({"series": f"saf_dead_letters{{{labels}}}", "values": letters})
    (rule,) = [one for one in rules() if one["alert"] == "SafDeadLetters"]
    said = {
        broker: {"labels": f'{{broker="{broker}", subscription="billing"}}', "value": letters}
        for broker, letters in (("more", 4), ("first", 1), ("again", 2))
    }
    asked = [("95m", [*said.values()]), ("115m", []), ("50m", [])]
    test = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": rule["expr"], "eval_time": at, "exp_samples": found}
                    for at, found in asked
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    done = run([needed("promtool", "prometheus"), "test", "rules", file])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_about_dead_letters_names_the_largest_group(tmp_path: Path) -> None:
    labels = 'broker="the \\"shop\\"", subscription="billing"'
    group = 'service="orders", reason="rejected"'
    figures = {
        f'saf_dead_letters{{{labels}, reason="rejected"}}': "_x20 7x40",
        f'saf_dead_letter_group_messages{{{labels}, {group}, group="0123456789ab"}}': "_x20 4x40",
        f'saf_dead_letter_group_messages{{{labels}, {group}, group="ba9876543210"}}': "_x20 2x40",
        'saf_dead_letters{broker="other", subscription="billing", reason="failed"}': "_x20 7x40",
    }
    rule = next(one for one in rules() if one["alert"] == "SafDeadLetters")
    said = {
        'the "shop"': "The largest failure group has 4, for service orders: "
        "saf dead list --group 0123456789ab",
        "other": "",
    }
    expected = [
        {
            "exp_labels": {"severity": "ticket", "broker": broker, "subscription": "billing"},
            "exp_annotations": {
                "summary": f"{broker}: 7 dead letters of billing wait for an operator, more than "
                "15 minutes ago",
                "description": description,
                "runbook": rule["annotations"]["runbook"],
            },
        }
        for broker, description in said.items()
    ]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in figures.items()
                ],
                "alert_rule_test": [
                    {"eval_time": "25m", "alertname": rule["alert"], "exp_alerts": expected}
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    done = run([needed("promtool", "prometheus"), "test", "rules", file])
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_on_metrics_that_there_are_and_has_a_runbook() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len({*names}) == len(names)
    said = page("operations.md")
    section = said.split("\n## Alerts\n")[1].split("\n## ")[0]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == names
    for rule in rules():
        check(rule["expr"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"] == f"operations.md#{rule['alert'].lower()}"


def test_each_panel_of_the_dashboard_asks_for_metrics_that_there_are() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    asked: set[str] = set()
    for panel in panels:
        for target in panel.get("targets", ()):
            check(target["expr"])
            asked |= {name for name, _ in metrics_of(target["expr"])}
            shown = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} - {"instance"}
            known = {one for name, _ in metrics_of(target["expr"]) for one in BY_NAME[name].labels}
            assert shown <= known, target
    left_out = {"saf_parked_lane_seconds", "saf_cycle_messages", "saf_purged_slots_total"}
    left_out.add("saf_dead_letter_group_messages")  # an alert names the group
    assert asked == BY_NAME.keys() - left_out


@pytest.mark.full
@pytest.mark.slow
def test_a_real_prometheus_scrapes_a_loop_and_the_databases_and_a_rule_fires(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"shop": app}, {"mom": mom})
    exporter, forwarder = free_port(), free_port()
    with connect(app) as connection:
        connection.execute(OLD)
    serve = ["metrics", "--listen", f"127.0.0.1:{exporter}", "--config", config]
    loop = ["forward", "--loop", "--metrics", f"127.0.0.1:{forwarder}", "--config", config]

    def firing(at: str) -> dict[str, str]:
        found = (get(f"{at}/alerts") or {}).get("alerts", [])
        return {one["labels"]["alertname"]: one["annotations"]["runbook"] for one in found}

    with started(*serve), prometheus(tmp_path, exporter, forwarder) as at:
        until(lambda: {"SafNotForwarding", "SafNoForwarder"} <= firing(at).keys())
        assert firing(at)["SafNoForwarder"] == "operations.md#safnoforwarder"
        assert "SafDeadLetters" not in firing(at)
        with connect(app) as connection:
            connection.execute(DEAD)
        until(lambda: "SafDeadLetters" in firing(at), seconds=90)
        with started(*loop):
            until(lambda: "SafNotForwarding" not in firing(at), seconds=90)
            wanted = {"saf_up", "saf_ring_used_slots", "saf_forwarded_messages_total"}
            until(lambda: wanted <= {*get(f"{at}/label/__name__/values")})
