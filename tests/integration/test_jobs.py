"""What jobs/ promises: files that a reader can use as they stand."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from saf import config
from saf.config import load
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.receiving.dispatch.settings import Endpoint
from tests.needed import needed
from tests.pipeline import connect
from tests.programs import BIN, ROOT, configuration, received, run, saf, send

JOBS = ROOT / "jobs"
UNITS = ("saf-forward.service", "saf-forward-loop.service", "saf-forward.timer")
CRONTAB = (JOBS / "crontab").read_text()


@pytest.fixture
def etc(granted: Callable[..., Dsn], tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    """What /etc/saf is on an operator's machine: saf.toml, and the secrets of forwarders."""
    text = (JOBS / "saf.toml").read_text()
    (tmp_path / "saf.toml").write_text(text.replace('# master = "local[*]"', 'master = "local[1]"'))
    logins = {"SHOP_DSN": granted(app, "forwarder"), "MOM_DSN": granted(mom, "forwarder")}
    (tmp_path / "secrets.env").write_text(
        "".join(f'{name}="{login.conninfo}"\n' for name, login in logins.items())
    )
    return tmp_path


def _options_of(command: str) -> set[str]:
    return set(re.findall(r"--[a-z-]+", saf(command, "--help").stdout))


def _paths(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w:/.{])(?:/[\w.-]+){2,}", text))


# crontab


def _crontab() -> tuple[dict[str, str], list[tuple[list[str], str]]]:
    """Its variables, and its lines as (the five fields of time, command), as cron reads them."""
    variables, jobs = {}, []
    for line in CRONTAB.splitlines():
        if not line or line.startswith("#"):
            continue
        if match := re.match(r"(\w+)=(.*)$", line):
            variables[match[1]] = match[2]
        else:
            *when, command = line.split(maxsplit=5)
            jobs.append((when, command))
    return variables, jobs


def test_the_crontab_forwards_and_what_it_says_goes_to_the_log(
    etc: Path, app: Dsn, mom: Dsn
) -> None:
    variables, ((when, command),) = _crontab()
    assert when == ["*"] * 5
    assert "%" not in command  # cron would read it as a new line
    stub = etc / "bin"
    stub.mkdir()
    (stub / "logger").write_text(f'#!/bin/sh\necho "$@" > {etc}/tag\ncat > {etc}/log\n')
    (stub / "logger").chmod(0o755)
    (stub / "saf").symlink_to(BIN / "saf")
    here = {
        "SAF_CONFIG": str(etc / "saf.toml"),
        "SECRETS": str(etc / "secrets.env"),
        "PATH": variables["PATH"].replace("/opt/saf/bin", str(stub)),
    }
    assert here.keys() | {"SHELL"} == variables.keys()
    send(app, 20)

    done = run([variables["SHELL"], "-c", command], env=here, cwd=etc)

    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")  # cron would mail it
    assert (etc / "tag").read_text() == "-t saf-forward\n"
    assert json.loads((etc / "log").read_text().splitlines()[-1])["forwarded"] == 20
    assert len(received(mom)) == 20


def test_the_file_of_secrets_means_to_the_crontabs_shell_what_it_means_to_systemd(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (text,) = re.findall(r"<!-- test: secrets -->\n```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "secrets.env").write_text(text)
    # as systemd.exec(5) says: in single quotes, everything up to the next one as it stands
    meant = dict(re.findall(r"^(\w+)='([^']*)'$", text, re.MULTILINE))
    assert len(meant) == len(text.splitlines())
    variables, ((_, command),) = _crontab()
    read = command.partition(" && saf ")[0]
    done = run(
        [variables["SHELL"], "-euc", f"{read} && env"],
        env={"SECRETS": str(tmp_path / "secrets.env")},
    )
    assert done.returncode == 0, done.stderr
    for name, value in meant.items():
        assert f"{name}={value}\n" in done.stdout
        assert Dsn(value).parts["user"] == "saf_forwarder"


# systemd


def _unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign] # systemd tells case apart
    parser.read_string((JOBS / name).read_text())
    return parser


@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_units_without_a_warning(name: str, tmp_path: Path) -> None:
    needed("systemd-analyze", "systemd")
    for unit in UNITS:
        text = (JOBS / unit).read_text()
        (tmp_path / unit).write_text(text.replace("/opt/saf/bin", str(BIN)))
    done = run(["systemd-analyze", "verify", "--man=no", str(tmp_path / name)])
    mine = [line for line in (done.stdout + done.stderr).splitlines() if str(tmp_path) in line]
    assert mine == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", UNITS[:2])
def test_the_services_run_a_command_that_exists_with_options_that_exist(name: str) -> None:
    service = _unit(name)["Service"]
    program, command, *options = service["ExecStart"].split()
    assert program == "/opt/saf/bin/saf"
    assert set(options) <= _options_of(command)
    assert service["Environment"] == "SAF_CONFIG=/etc/saf/saf.toml"
    assert service["EnvironmentFile"] == "/etc/saf/secrets.env"


def test_the_units_do_with_each_exit_code_what_the_table_says() -> None:
    once = _unit("saf-forward.service")["Service"]
    loop = _unit("saf-forward-loop.service")["Service"]
    assert once["SuccessExitStatus"] == "75"
    assert "Restart" not in once
    assert loop["Restart"] == "on-failure"
    assert loop["RestartForceExitStatus"] == "75"
    assert loop["RestartPreventExitStatus"] == "2"


def test_the_service_forwards_with_the_settings_of_its_unit(etc: Path, app: Dsn, mom: Dsn) -> None:
    command = _unit("saf-forward.service")["Service"]["ExecStart"].split()
    secrets = dict(line.split("=", 1) for line in (etc / "secrets.env").read_text().splitlines())
    # systemd takes quotes off the values
    env = {name: value.strip('"') for name, value in secrets.items()}
    send(app, 5)
    done = run([BIN / "saf", *command[1:]], env={**env, "SAF_CONFIG": str(etc / "saf.toml")})
    assert done.returncode == 0, done.stderr
    assert len(received(mom)) == 5


@pytest.mark.parametrize("name", UNITS[:2])
def test_the_services_user_may_be_a_role_by_peer_and_its_comment_grants_it(name: str) -> None:
    text = (JOBS / name).read_text()
    user = _unit(name)["Service"]["User"]
    assert user not in ("saf", "root")
    assert re.fullmatch(r"[a-z_][a-z0-9_]*", user)  # a role's name without quotes
    assert f"useradd --system --home-dir /var/lib/saf {user}\n" in text
    assert f"saf grant --role forwarder {user} " in text
    assert f"saf grant --role forwarder {user} " in CRONTAB
    assert f"crontab -u {user} " in CRONTAB


def test_a_service_is_stopped_by_a_signal_to_the_forwarder_alone() -> None:
    for name in UNITS[:2]:
        assert _unit(name)["Service"]["KillMode"] == "mixed"


# Airflow


class Operator:
    """As much of Airflow's BashOperator as the DAG stands on."""

    made: list[Operator]

    def __init__(
        self, *, bash_command: str, skip_on_exit_code: int, append_env: bool, **options: Any
    ) -> None:
        self.bash_command = bash_command
        self.skip_on_exit_code = skip_on_exit_code
        self.append_env = append_env
        self.options = options
        self.made.append(self)

    def execute(self, context: object) -> str:  # noqa: ARG002 - Airflow's signature
        done = run(["bash", "-c", self.bash_command], env=dict(os.environ))
        if done.returncode == self.skip_on_exit_code:
            raise Skipped(f"exit code {done.returncode}")
        if done.returncode:
            raise Failed(f"exit code {done.returncode}")
        return done.stdout.splitlines()[-1]


class Dag:
    """As much of Airflow's DAG."""

    made: list[dict[str, Any]]

    def __init__(self, **options: Any) -> None:
        self.made.append(options)

    def __enter__(self) -> Dag:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Failed(Exception):
    """Airflow's AirflowException: tried again, as often as `retries` says."""


class FailedForGood(Exception):
    """Airflow's AirflowFailException: not tried again."""


class Skipped(Exception):
    """Airflow's AirflowSkipException: what BashOperator makes of skip_on_exit_code."""


@pytest.fixture(params=["airflow 2", "airflow 3"])
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """The DAG's one task, loaded with the modules that Airflow has under these names."""
    Operator.made, Dag.made = [], []
    errors = {"AirflowFailException": FailedForGood, "AirflowSkipException": Skipped}
    modules: dict[str, dict[str, object]] = {"airflow": {}}
    if request.param == "airflow 2":
        modules["airflow"] = {"DAG": Dag}
        modules["airflow.exceptions"] = dict(errors)
        modules["airflow.operators"] = {}
        modules["airflow.operators.bash"] = {"BashOperator": Operator}
    else:
        modules["airflow.sdk"] = {"DAG": Dag}
        modules["airflow.sdk.exceptions"] = dict(errors)
        modules["airflow.providers"] = modules["airflow.providers.standard"] = {}
        modules["airflow.providers.standard.operators"] = {}
        modules["airflow.providers.standard.operators.bash"] = {"BashOperator": Operator}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    runpy.run_path(str(JOBS / "airflow_dag.py"))
    (task,) = Operator.made
    return task


def test_the_dag_forwards_and_is_done(
    task: Operator, etc: Path, app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, etc, SHOP_DSN=app.conninfo, MOM_DSN=mom.conninfo)
    send(app, 7)
    assert json.loads(task.execute({}))["forwarded"] == 7
    assert len(received(mom)) == 7


@pytest.mark.full
def test_the_dag_tries_again_while_a_database_is_down_and_not_what_a_person_has_to_mend(
    task: Operator, etc: Path, app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "postgresql://saf_forwarder@127.0.0.1:1/nowhere"
    _set(monkeypatch, etc, SHOP_DSN=nowhere, MOM_DSN=app.conninfo)
    with pytest.raises(Failed, match="exit code 75"):
        task.execute({})
    assert task.options["retries"] > 0
    monkeypatch.setenv("SAF_CONFIG", str(etc / "none.toml"))
    with pytest.raises(FailedForGood, match="exit code 2"):
        task.execute({})


@pytest.mark.full
def test_messages_that_wait_for_a_service_do_not_fail_the_dag(
    task: Operator, etc: Path, app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, etc, SHOP_DSN=app.conninfo, MOM_DSN=mom.conninfo)
    with connect(mom) as connection:
        connection.execute("INSERT INTO saf.service (name) VALUES ('shipping')")
    send(app, 1)
    said = json.loads(task.execute({}))
    assert (said["forwarded"], said["waiting_lanes"], said["exit_code"]) == (0, 1, 0)


def test_another_try_comes_soon_and_there_are_few_because_the_next_run_is_one_too(
    task: Operator,
) -> None:
    assert task.options["retries"] == 2
    assert task.options["retry_delay"] == timedelta(seconds=30)
    assert task.options["retry_exponential_backoff"] is False
    assert "max_retry_delay" not in task.options


def test_the_dag_runs_once_at_a_time_and_does_not_catch_up(task: Operator) -> None:
    (dag,) = Dag.made
    assert dag["max_active_runs"] == 1
    assert dag["catchup"] is False
    assert task.append_env is True


def test_loading_the_dag_imports_nothing_but_airflow_and_the_standard_library() -> None:
    tree = ast.parse((JOBS / "airflow_dag.py").read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"airflow"}


def _set(monkeypatch: pytest.MonkeyPatch, etc: Path, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SAF_CONFIG", str(etc / "saf.toml"))
    monkeypatch.setenv("SAF_COMMAND", str(BIN / "saf"))


# saf.toml


def test_the_example_configuration_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DSN", "postgresql://saf_forwarder:secret@db1/shop")
    monkeypatch.setenv("MOM_DSN", "postgresql://saf_forwarder:secret@mom/mom")
    settings = load(JOBS / "saf.toml")
    assert set(settings.brokers) == {"shop"}
    assert set(settings.destinations) == {"mom"}


def test_the_example_explains_every_setting_and_each_default_is_the_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (JOBS / "saf.toml").read_text()
    # a commented setting, not a commented sentence
    setting = re.compile(r'^# ("?[\w.]+"? = .*)$', re.MULTILINE)
    tables = tomllib.loads(setting.sub(r"\1", text))
    monkeypatch.setenv("SHOP_DSN", "dbname=shop")
    monkeypatch.setenv("MOM_DSN", "dbname=mom")
    plain = load(JOBS / "saf.toml")
    for model, shown, real in (
        (config.Broker, tables["brokers"]["shop"], plain.brokers["shop"]),
        (Postgresql, tables["destinations"]["mom"], plain.destinations["mom"]),
        (config.Forwarder, tables["forwarder"], plain.forwarder),
        (config.Purge, tables["purge"], plain.purge),
    ):
        assert set(shown) == set(model.model_fields)
        for name in shown:
            found = re.findall(rf"^(?:# )?{name} = .*$|^\[forwarder\.{name}\]$", text, re.MULTILINE)
            assert found
            for line in found:
                assert "#" in line.lstrip("# ") or line.startswith("["), f"{line} is not explained"
                if line.startswith("# ") and "# example" not in line:
                    assert shown[name] == getattr(real, name)
    examples = re.findall(r"^#   \[.*(?:\n#   .*)+", text, re.MULTILINE)
    more = tomllib.loads("\n".join(examples).replace("#   ", ""))
    example = config.Fleet(**{**more["fleets"]["tenants"], "dsn": "dbname=x"})
    fields = config.Fleet.model_fields
    assert {*more["fleets"]["tenants"], "query"} == set(fields)
    assert example.refresh_seconds == fields["refresh_seconds"].default
    assert set(more["routes"][0]) == set(config.Route.model_fields)
    assert set(more["topics"]["prices"]) == set(config.Topic.model_fields)
    assert set(more["routers"]["departures"]) == set(config.Router.model_fields)
    assert set(more["transforms"][0]) == set(config.Transform.model_fields)
    shown = {*more["endpoints"]["billing"], "method", "user", "password"}
    assert shown == set(Endpoint.model_fields)
    assert set(more["ui"]) == set(config.Ui.model_fields)
    assert {*tables, *more} == set(config.Settings.model_fields)


# all of them


@pytest.mark.parametrize("name", ["crontab", *UNITS, "airflow_dag.py", "saf.toml"])
def test_the_files_speak_of_the_same_places(name: str) -> None:
    text = (JOBS / name).read_text()
    ours = {path for path in _paths(text) if path.startswith(("/opt", "/etc/saf", "/var/lib"))}
    assert ours <= {
        "/opt/saf",
        "/opt/saf/bin",
        "/opt/saf/bin/pip",
        "/opt/saf/bin/saf",
        "/etc/saf/saf.toml",
        "/etc/saf/secrets.env",
        "/var/lib/saf",
    }
    for mentioned in re.findall(r"\bjobs/[\w.-]+", text):
        assert (ROOT / mentioned).is_file()


@pytest.mark.full
def test_overlapping_runs_need_no_lock(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, master="local[1]")
    expected = send(app, 2000)
    command = [sys.executable, str(JOBS / "forward.py"), "--config", str(tmp_path / "saf.toml")]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in runs:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr
    again = run(command)
    assert again.returncode == 0, again.stderr
    assert sorted(body for _, body in received(mom)) == sorted(expected)


def test_the_spark_submit_script_takes_the_options_of_saf_forward() -> None:
    said = run([sys.executable, JOBS / "forward.py", "--help"]).stdout
    assert set(re.findall(r"--[a-z-]+", said)) == _options_of("forward")
