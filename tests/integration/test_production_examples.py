"""The files in examples/production/ work as they stand, as far as one sees without a cluster."""

from __future__ import annotations

import configparser
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg import sql

from saf.broker.services import create_service
from saf.config import Settings, load
from saf.database import Dsn, fetch
from tests import manifests
from tests.needed import needed
from tests.pipeline import connect, forward
from tests.programs import BIN, ROOT, last_json, run, saf, send

FOLDER = ROOT / "examples" / "production"
UNIT = FOLDER / "saf-worker.service"
MANIFESTS = manifests.read((FOLDER / "kubernetes.yaml").read_text())


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda one: f"{one['kind']}/{one['metadata']['name']}"
)
def test_kubernetes_takes_each_manifest(manifest: manifests.Manifest) -> None:
    manifests.validate(manifest)


def test_each_pod_is_nobody_and_gets_its_secrets_from_the_environment() -> None:
    manifests.refuse_privileges(MANIFESTS)
    for pod in manifests.pods(MANIFESTS).values():
        for container in pod["containers"]:
            assert container["envFrom"]


def test_each_container_runs_a_command_that_exists_with_options_that_exist() -> None:
    found = dict(manifests.commands(MANIFESTS))
    assert found.keys() == {"worker", "forwarder", "reconcile"}
    for words in found.values():
        manifests.refuse_unknown_words(words)


def test_a_deployments_pods_are_those_that_it_looks_for_and_have_time_to_stop() -> None:
    for name, one in manifests.named(MANIFESTS, "Deployment").items():
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels, name
        assert one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


def test_each_container_does_its_work_with_the_rights_of_the_role_that_the_file_names(
    granted: Callable[..., Dsn], app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = manifests.config(MANIFESTS, tmp_path)
    assert load_with(config, app, mom).forwarder.default_destination == "mom"
    words = {name: list(words) for name, words in manifests.commands(MANIFESTS)}
    with connect(mom) as store:
        create_service(store, "billing")
    send(app, 3)

    def done(container: str, kind: str) -> str:
        arguments = [
            str(config) if word == "/etc/saf/saf.toml" else word for word in words[container]
        ]
        env = {
            "SHOP_DSN": granted(app, kind).conninfo,
            "MOM_DSN": granted(mom, kind).conninfo,
        }
        done = saf(*(word for word in arguments if word != "--loop"), env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert last_json(done("forwarder", "forwarder"))["forwarded"] == 3
    assert last_json(done("reconcile", "operator"))


def load_with(file: Path, app: Dsn, mom: Dsn) -> Settings:
    """The settings of a saf.toml whose dsns come from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_DSN", app.conninfo)
        patch.setenv("MOM_DSN", mom.conninfo)
        return load(file)


def test_systemd_takes_the_unit_without_a_warning(tmp_path: Path) -> None:
    needed("systemd-analyze", "systemd")
    text = UNIT.read_text().replace("/opt/billing/bin", str(BIN))
    (tmp_path / UNIT.name).write_text(text.replace("/opt/billing/app", str(tmp_path)))
    done = run(["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)])
    mine = [line for line in (done.stdout + done.stderr).splitlines() if str(tmp_path) in line]
    assert mine == []
    assert done.returncode == 0, done.stderr


def test_the_units_command_handles_what_is_there_as_a_receiver_who_owns_its_table(
    granted: Callable[..., Dsn], app: Dsn, mom: Dsn
) -> None:
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
        login = granted(mom, "receiver")
        role = sql.Identifier(str(login.parts["user"]))
        store.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(role))
        env = {"MOM_DSN": login.conninfo}
        done = run([BIN / "saf", *arguments[:-2], "--drain"], cwd=FOLDER.parent, env=env)
        assert done.returncode == 0, done.stderr
        assert fetch(store, "SELECT number FROM invoice") == [("A-1",)]
