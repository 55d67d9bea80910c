"""OpenLineage: the datasets of a run; nothing needs its provider."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import AIRFLOW, SAF, Site, saf

READS = """
SafForwardOperator(task_id="forward", saf=SAF) >> PythonOperator(
    task_id="read", python_callable=print, inlets=[destination("mom", "parts/small")]
)
"""

WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("openlineage", "airflow.providers.openlineage")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import airflow.configuration  # reads the metadata of all providers
sys.meta_path.insert(0, Missing())
for name in [name for name in sys.modules if "openlineage" in name]:
    del sys.modules[name]
import saf_airflow, saf_airflow.lineage, saf_airflow_provider

info = saf_airflow_provider.get_provider_info()
saf = saf_airflow.Saf(command=sys.argv[1], config=sys.argv[2])
operator = saf_airflow.SafForwardOperator(task_id="forward", saf=saf, asset_alias=None)
print(operator.execute({})["forwarded"], [name for name in sys.modules if "openlineage" in name])
"""
"""The operator at work where neither OpenLineage nor its provider can be imported."""


def test_a_run_names_its_sources_and_where_its_messages_have_arrived(
    site: Site, tmp_path: Path
) -> None:
    events = tmp_path / "events.json"
    saf("service", "create", "parts/small", "--config", site.config)
    site.send(3)
    site.send(2, service="parts/small")
    site.dag("lineage", READS)
    transport = {"type": "file", "log_file_path": str(events), "append": True}
    done = subprocess.run(
        [AIRFLOW, "dags", "test", "lineage"],
        env={**site.environment, "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert site.stored() == 5, done.stdout
    found = completed(events)
    assert {(one["namespace"], one["name"]) for one in found["forward"]["inputs"]} == {
        ("saf", "shop")
    }
    arrived = {
        (one["namespace"], one["name"]): one["outputFacets"]["outputStatistics"]["rowCount"]
        for one in found["forward"]["outputs"]
    }
    assert arrived == {
        ("saf", "mom"): 5,
        ("saf", "mom/billing"): 3,
        ("saf", "mom/parts%2Fsmall"): 2,
    }
    assert [(one["namespace"], one["name"]) for one in found["read"]["inputs"]] == [
        ("saf", "mom/parts%2Fsmall")
    ]


def completed(file: Path) -> dict[str, dict[str, Any]]:
    """The event of each task that has completed."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        one["job"]["name"].rpartition(".")[2]: one
        for one in events
        if one["eventType"] == "COMPLETE" and "." in one["job"]["name"]
    }


def test_without_openlineages_provider_nothing_is_missing(site: Site) -> None:
    site.send(2)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, SAF, site.config],
        env=site.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["2 []"], done.stdout + done.stderr
    assert site.stored() == 2
