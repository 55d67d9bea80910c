"""The files in examples/production/ work as they stand, as far as one sees without a cluster."""

from __future__ import annotations

import configparser
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn, fetch
from tests.needed import needed
from tests.pipeline import connect, forward
from tests.programs import BIN, ROOT, run, saf

FOLDER = ROOT / "examples" / "production"
UNIT = FOLDER / "saf-worker.service"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """The manifests of a kind, by name."""
    return {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] == kind}


def pods() -> dict[str, dict[str, Any]]:
    """What runs, by name."""
    jobs = {
        name: one["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for name, one in of_kind("CronJob").items()
    }
    return jobs | {n: one["spec"]["template"]["spec"] for n, one in of_kind("Deployment").items()}


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda one: f"{one['kind']}/{one['metadata']['name']}"
)
def test_kubernetes_takes_each_manifest(manifest: dict[str, Any]) -> None:
    import kubernetes_validate  # takes seconds, which every run's collection would pay

    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_each_pod_is_nobody_and_gets_its_secrets_from_the_environment() -> None:
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"], name
        for container in pod["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"], name
            assert container["envFrom"], name


def test_each_container_runs_a_command_that_exists_with_options_that_exist() -> None:
    for name, pod in pods().items():
        (container,) = pod["containers"]
        words = container.get("args") or container["command"][1:]
        told = saf(words[0], "--help").stdout
        for word in words:
            assert not word.startswith("--") or word in told, (name, word)


def test_a_deployments_pods_are_those_that_it_looks_for_and_have_time_to_stop() -> None:
    for name, one in of_kind("Deployment").items():
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels, name
        assert one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


def test_the_config_map_holds_a_saf_toml_that_loads(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = of_kind("ConfigMap")["saf"]["data"]["saf.toml"]
    assert tomllib.loads(text)
    (tmp_path / "saf.toml").write_text(text)
    monkeypatch.setenv("SHOP_DSN", app.conninfo)
    monkeypatch.setenv("STORE_DSN", mom.conninfo)
    assert load(tmp_path / "saf.toml").forwarder.default_destination == "store"


def test_systemd_takes_the_unit_without_a_warning(tmp_path: Path) -> None:
    needed("systemd-analyze", "systemd")
    text = UNIT.read_text().replace("/opt/billing/bin", str(BIN))
    (tmp_path / UNIT.name).write_text(text.replace("/opt/billing/app", str(tmp_path)))
    done = run(["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)])
    mine = [line for line in (done.stdout + done.stderr).splitlines() if str(tmp_path) in line]
    assert mine == []
    assert done.returncode == 0, done.stderr


def test_the_units_command_handles_what_is_there(app: Dsn, mom: Dsn) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    unit.read_string(UNIT.read_text())
    program, *arguments = unit["Service"]["execstart"].split()
    assert program == "/opt/billing/bin/saf"
    assert arguments[-2:] == ["--processes", "2"]  # it stays; once is enough here
    with connect(mom) as store:
        create_service(store, "billing")
        sent = [str(BIN / "python"), "with_psycopg.py", "A-1", "90"]
        done = run(sent, cwd=FOLDER.parent, env={"SHOP_DSN": app.conninfo})
        assert done.returncode == 0, done.stderr
        forward(app, mom=mom)
        env = {"STORE_DSN": mom.conninfo}
        done = run([BIN / "saf", *arguments[:-2], "--drain"], cwd=FOLDER.parent, env=env)
        assert done.returncode == 0, done.stderr
        assert fetch(store, "SELECT number FROM invoice") == [("A-1",)]
