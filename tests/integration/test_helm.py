"""The chart of ops/helm: Kubernetes and KEDA take it, and its programs work with their roles."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from saf.broker.grants import Kind
from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn
from saf_demo.servers import free_port
from tests import manifests
from tests.endpoints import Partner, partner
from tests.manifests import Manifest
from tests.pages import blocks, page
from tests.pipeline import connect
from tests.programs import BIN, environment, last_json, run, saf, send
from tests.receivers import put
from tests.rights import expected, rights
from tests.scraping import scrape, served
from tests.waits import until

__all__ = ["partner"]

COMPONENTS = ("forwarder", "dispatcher", "ui", "exporter")
VARIABLES = ("SHOP_DSN", "MOM_DSN")
ENDPOINT = """
[endpoints.billing]
url = "https://billing.example.com/hooks"
broker = "mom"
"""
TOKENS = """
[ui]
token = "${UI_TOKEN}"
hosts = ["saf.example.com"]
"""
GRANTS = {
    "SHOP_DSN": {"grants": {"role_a": ["forwarder"], "role_b": ["writer", "receiver"]}},
    "MOM_DSN": {},
}
EVERYTHING: dict[str, Any] = {
    "dispatcher": {
        "enabled": True,
        "config": ENDPOINT,
        "autoscaling": {"enabled": True, "subscriptions": ["billing", "stock"]},
    },
    "forwarder": {"autoscaling": {"enabled": True}},
    "ui": {"enabled": True, "config": TOKENS, "write": True},
    "migrate": {"enabled": True, "databases": GRANTS},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "batch", "operator": "Exists"}],
}
CASES: dict[str, dict[str, Any]] = {
    "as it stands": {},
    "a run a minute": {"forwarder": {"mode": "cron"}},
    "without a forwarder": {"forwarder": {"mode": "off"}},
    "everything": EVERYTHING,
    "figures from a Prometheus": {
        **EVERYTHING,
        "autoscaling": {"prometheus": "http://prometheus.monitoring:9090"},
    },
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> list[Manifest]:
    return manifests.chart(CASES[request.param])


def test_helm_has_nothing_to_say_against_the_chart() -> None:
    for values in CASES.values():
        found = manifests.helm().lint(
            str(manifests.CHART), values, strict=True, kube_version="v1.33.0"
        )
        assert not found["errors"]
        # 1 is a hint: an icon
        assert [one for one in found["messages"] if one["severity"] > 1] == []


def test_kubernetes_and_keda_take_each_manifest(case: list[Manifest]) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in case]
    assert len(set(names)) == len(names)
    for manifest in case:
        manifests.validate(manifest)


def test_an_unknown_field_of_a_scaled_object_is_refused() -> None:
    (first, *_) = manifests.named(manifests.chart(EVERYTHING), "ScaledObject").values()
    with pytest.raises(AssertionError):
        manifests.validate({**first, "spec": {**first["spec"], "replicas": 2}})


def test_no_pod_has_privileges_or_writes_to_its_image_and_secrets_are_only_named(
    case: list[Manifest],
) -> None:
    manifests.refuse_privileges(case)


def test_each_container_runs_a_command_that_exists_with_options_that_exist(
    case: list[Manifest],
) -> None:
    for _, words in manifests.commands(case):
        manifests.refuse_unknown_words(words)


def test_what_points_to_something_finds_it(case: list[Manifest]) -> None:
    workloads = manifests.named(case, "Deployment")
    labels = {n: one["spec"]["template"]["metadata"]["labels"] for n, one in workloads.items()}
    for name, one in workloads.items():
        assert one["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
        assert one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 60
    for name, one in manifests.named(case, "Service").items():
        assert one["spec"]["selector"].items() <= labels[name].items()
    for one in manifests.named(case, "ScaledObject").values():
        target = workloads[one["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"], "an upgrade would undo what KEDA has decided"
    ((name, files),) = manifests.named(case, "ConfigMap").items()
    for pod in manifests.pods(case).values():
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] == name
                assert {item["key"] for item in volume["configMap"]["items"]} <= files[
                    "data"
                ].keys()


def test_each_component_has_a_saf_toml_that_needs_only_its_own_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "dbname=any")
    case = manifests.chart(EVERYTHING)
    found = {}
    for component in ("forwarder", "exporter", "dispatcher"):
        found[component] = load(manifests.config(case, tmp_path, f"{component}.toml"))
        assert found[component].forwarder.default_destination == "mom"
    assert set(found["dispatcher"].endpoints) == {"billing"}
    assert not found["forwarder"].endpoints
    monkeypatch.setenv("UI_TOKEN", "x" * 32)
    assert load(manifests.config(case, tmp_path, "ui.toml")).ui.hosts == ("saf.example.com",)


def test_the_values_of_the_page_are_those_of_the_chart() -> None:
    text = page("kubernetes.md")
    written = [yaml.safe_load(one) for one in blocks(text, "values")]
    assert len(written) == 2
    for values in written:
        case = manifests.chart(values)
        for manifest in case:
            manifests.validate(manifest)
    for name in COMPONENTS:
        assert f"| `saf-{name}` |" in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"forwarder": {"replica": 2}}, "replica"),
        ({"forwarder": {"mode": "sometimes"}}, "mode"),
        ({"ui": {"secret": "A secret!"}}, "secret"),
        ({"exporter": {"port": "9464"}}, "port"),
        ({"migrate": {"databases": {"X": {"grants": {"a; rm": ["writer"]}}}}}, "rm"),
        ({"migrate": {"databases": {"X": {"grants": {"a": ["superuser"]}}}}}, "a"),
        ({"dispatcher": {"autoscaling": {"enabled": True}}}, "subscriptions"),
        ({"migrate": {"enabled": True}}, "databases"),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_refused_by_name(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(manifests.helm().HelmValuesError, match=re.escape(said)):
        manifests.chart(values)


@pytest.mark.parametrize(
    "line",
    [
        'dsn = "postgresql://saf_forwarder:s3cret@db1/shop"',
        'dsn = "host=db1 password=s3cret"',
        '[ui]\ntoken = "s3cret"',
    ],
)
def test_a_secret_in_the_configuration_is_refused_and_not_repeated(line: str) -> None:
    with pytest.raises(
        manifests.helm().HelmRenderError, match=r"write \$\{NAME\} instead"
    ) as refused:
        manifests.chart({"config": f"[brokers.shop]\n{line}\n"})
    assert "s3cret" not in str(refused.value)


def test_a_scaler_without_figures_is_refused() -> None:
    with pytest.raises(manifests.helm().HelmRenderError, match=r"set exporter\.enabled, or"):
        manifests.chart(
            {"exporter": {"enabled": False}, "forwarder": {"autoscaling": {"enabled": True}}}
        )


def test_the_migration_brings_the_schema_and_the_rights_that_the_values_name(
    new_role: Callable[..., str], new_database: Callable[[str], Dsn]
) -> None:
    roles = {"role_a": new_role(), "role_b": new_role()}
    given = {roles[name]: kinds for name, kinds in GRANTS["SHOP_DSN"]["grants"].items()}
    values = {"migrate": {"enabled": True, "databases": {"SHOP_DSN": {"grants": given}}}}
    ((_, pod),) = [
        (name, pod)
        for name, pod in manifests.pods(manifests.chart(values)).items()
        if "migrate" in name
    ]
    (container,) = pod["containers"]
    shop = new_database("shop")
    for _ in range(2):  # an upgrade does it again
        done = run(
            [*container["command"], *container["args"]],
            env={"SAF_DSN": shop.conninfo, "PATH": f"{BIN}:/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
    assert rights(shop, roles["role_a"]) == expected(Kind.FORWARDER)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A component of the chart, as its pod runs it."""

    words: list[str]
    """The arguments of the command saf."""
    env: dict[str, str]

    def once(self, *without: str) -> str:
        """Run it to its end, without some words; return its standard output."""
        done = saf(*(word for word in self.words if word not in without), env=self.env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it until the block ends."""
        command = [str(BIN / "saf"), *self.words]
        with subprocess.Popen(command, env=environment(**self.env)) as process:
            try:
                yield
            finally:
                process.terminate()
                assert process.wait(timeout=60) == 0


@pytest.fixture
def pod(
    granted: Callable[..., Dsn], app: Dsn, mom: Dsn, tmp_path: Path
) -> Callable[[str, dict[str, Any]], Pod]:
    """Starts components with the roles that values.yaml names beside their Secrets."""
    text = (manifests.CHART / "values.yaml").read_text()
    kinds = dict(re.findall(r"secret: saf-(\w+) # saf grant --role (\w+)", text))
    assert kinds.keys() == {*COMPONENTS}
    with connect(mom) as store:
        create_service(store, "billing")

    def start(component: str, values: dict[str, Any]) -> Pod:
        case = manifests.chart(values)
        env = {
            "SHOP_DSN": granted(app, kinds[component]).conninfo,
            "MOM_DSN": granted(mom, kinds[component]).conninfo,
            "SAF_CONFIG": str(manifests.config(case, tmp_path, f"{component}.toml")),
        }
        return Pod(words=dict(manifests.commands(case))[component], env=env)

    return start


def test_the_forwarder_forwards_with_the_rights_of_its_role(
    pod: Callable[..., Pod], app: Dsn
) -> None:
    send(app, 3)
    assert last_json(pod("forwarder", {}).once("--loop"))["forwarded"] == 3
    send(app, 2)
    assert last_json(pod("forwarder", {"forwarder": {"mode": "cron"}}).once())["forwarded"] == 2


def test_the_dispatcher_sends_with_the_rights_of_its_role(
    pod: Callable[..., Pod], mom: Dsn, partner: Partner
) -> None:
    put(mom, "1", "2", key="a")
    endpoint = ENDPOINT.replace("https://billing.example.com/hooks", partner.url)
    dispatcher = pod("dispatcher", {"dispatcher": {"enabled": True, "config": endpoint}})
    assert dispatcher.once("--loop") == "billing: handled 2 messages\n"
    assert partner.by_key() == {"a": [1, 2]}


def test_the_dashboard_shows_both_databases_with_the_rights_of_its_role(
    pod: Callable[..., Pod],
) -> None:
    port, token = free_port(), "only-looking-around"
    config = TOKENS.replace("saf.example.com", "127.0.0.1")
    dashboard = pod("ui", {"ui": {"enabled": True, "port": port, "config": config}})
    shown = replace(dashboard, env={**dashboard.env, "UI_TOKEN": token})
    with shown.running(), httpx.Client(base_url=f"http://127.0.0.1:{port}") as visitor:
        until(lambda: served(port))
        visitor.post("/login", data={"token": token, "name": "ann"})
        text = visitor.get("/").text
    assert "shop" in text
    assert "mom" in text


def found(text: str, location: str) -> float:
    """What KEDA's scaler metrics-api reads at a place: the first series with these labels."""
    name, labels = re.fullmatch(r"(\w+)\{(.*)\}", location).groups()  # type: ignore[union-attr]
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and wanted.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"KEDA would fail: {location} is absent")


def test_keda_finds_each_figure_at_the_exporter_also_while_nothing_waits(
    pod: Callable[..., Pod], app: Dsn, mom: Dsn
) -> None:
    port = free_port()
    values = {
        "exporter": {"port": port},
        "forwarder": {"autoscaling": {"enabled": True}},
        "dispatcher": {
            "enabled": True,
            "autoscaling": {"enabled": True, "subscriptions": ["billing"]},
        },
    }
    scalers = manifests.named(manifests.chart(values), "ScaledObject")
    triggers = {name: one["spec"]["triggers"][0]["metadata"] for name, one in scalers.items()}
    assert triggers.keys() == {"prod-forwarder", "prod-dispatcher"}
    for name, metadata in triggers.items():
        assert metadata["url"] == f"http://prod-exporter.orders:{port}/metrics", name
        assert metadata["format"] == "prometheus"

    def figures() -> dict[str, float]:
        text = scrape(port)
        return {name: found(text, one["valueLocation"]) for name, one in triggers.items()}

    with pod("exporter", values).running():
        until(lambda: served(port))
        assert figures() == {"prod-forwarder": 0, "prod-dispatcher": 0}
        with connect(app) as source, connect(mom) as store:
            source.execute(
                "INSERT INTO saf.outbox (to_service, body, created_at) "
                "VALUES ('billing', '', now() - interval '90 s')"
            )
            store.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('billing', '')")
        until(lambda: figures()["prod-forwarder"] >= 90)
        assert figures()["prod-dispatcher"] == 1
