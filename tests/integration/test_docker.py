"""What docker/ promises, as far as it can be kept without an engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from psycopg import sql

from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.config import load
from saf.database import Dsn
from tests.pipeline import connect
from tests.programs import BIN, ROOT, environment, run
from tests.roles import as_user

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DATABASES = {name: service for name, service in SERVICES.items() if "build" not in service}
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
FLIGHTS = 600
ROLES = {"saf_forwarder": "FORWARDER", "flights": "FLIGHTS"}
"""The roles that roles.sql creates, and how the variables of their passwords begin."""


def _stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages by name: (instruction, rest), those of the stage below it first."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(str.strip, text.splitlines()):
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            below, _, name = rest.split()
            stages[name] = list(stages.get(below, []))
        elif name:
            stages[name].append((instruction, " ".join(rest.split())))
    return stages


STAGES = _stages()


def _all(stage: str, instruction: str) -> list[str]:
    return [rest for found, rest in STAGES[stage] if found == instruction]


def _last(stage: str, instruction: str) -> str:
    return _all(stage, instruction)[-1]


def _command(service: dict[str, Any]) -> list[str]:
    """What a container of ours runs."""
    stage = service["build"]["target"]
    entrypoint = service.get("entrypoint") or json.loads(_last(stage, "ENTRYPOINT"))
    default = _all(stage, "CMD") if "entrypoint" not in service else []
    command = service.get("command") or (json.loads(default[-1]) if default else [])
    return [*entrypoint, *command]


def _interpolated(value: str) -> str:
    return VARIABLE.sub(lambda match: match[2], value)


def _here(value: str, places: dict[str, Dsn]) -> str:
    """A DSN of the compose file as one of the test's databases, having checked that it fits."""
    parts = Dsn(_interpolated(value)).parts
    declared = {k: _interpolated(v) for k, v in SERVICES[parts["host"]]["environment"].items()}
    assert parts["dbname"] == declared["POSTGRES_DB"]
    user, password = str(parts["user"]), parts["password"]
    if user == declared["POSTGRES_USER"]:
        assert password == declared["POSTGRES_PASSWORD"]
        return places[parts["host"]].conninfo
    assert password == declared[f"{ROLES[user]}_PASSWORD"]
    return as_user(places[parts["host"]], user).conninfo


def _environment(service: dict[str, Any], places: dict[str, Dsn]) -> dict[str, str]:
    given = {name: _here(value, places) for name, value in service["environment"].items()}
    return {**given, "PATH": f"{BIN}:{os.environ['PATH']}"}


def test_the_compose_file_follows_the_compose_specification() -> None:
    import jsonschema  # takes seconds where it has everything for formats

    package = find_spec("check_jsonschema")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "builtin_schemas/vendor/compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(file.read_text()))


def test_each_variable_of_the_compose_file_has_a_default() -> None:
    found = VARIABLE.findall((DOCKER / "compose.yaml").read_text())
    given = {f"{name}_PASSWORD" for name in ("APP", "MOM", *ROLES.values())}
    assert {name for name, _ in found} == given
    assert all(default for _, default in found)


def test_each_service_waits_for_services_that_can_become_what_it_waits_for() -> None:
    for service in SERVICES.values():
        for other, wait in service.get("depends_on", {}).items():
            awaited = SERVICES[other]
            if wait["condition"] == "service_healthy":
                assert "test" in awaited["healthcheck"]
            else:
                assert wait["condition"] == "service_completed_successfully"
                assert "restart" not in awaited


def test_each_path_of_the_compose_file_exists_and_each_volume_is_declared() -> None:
    for service in OURS.values():
        context = DOCKER / service["build"]["context"]
        assert context.resolve() == ROOT
        assert (context / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
        assert service["build"]["target"] in STAGES
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (DOCKER / source).is_file()
            if source == "./roles.sql":
                assert target == "/docker-entrypoint-initdb.d/roles.sql"
            elif source.startswith("."):
                assert f"SAF_CONFIG={target}" in _last("forwarder", "ENV")
            else:
                assert source in COMPOSE["volumes"]
                assert target == "/var/lib/postgresql"  # where the images keep data since 18


def test_the_databases_health_check_is_a_command_that_works(
    new_database: Callable[[str], Dsn],
) -> None:
    dsn = new_database("health")
    for service in DATABASES.values():
        kind, command = service["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        assert service["image"] == "postgres:18"
        assert f"--dbname {service['environment']['POSTGRES_DB']}" in command
        assert f"--username {service['environment']['POSTGRES_USER']}" in command
        # the test's server listens on a socket only
        here = command.replace("127.0.0.1", str(dsn.parts["host"]))
        done = run(
            ["sh", "-c", here], env={"PATH": f"{programs(DEFAULT_VERSION)}:{os.environ['PATH']}"}
        )
        assert done.returncode == 0, done.stderr


def test_only_migrations_log_in_as_the_owner() -> None:
    for name, service in OURS.items():
        users = {Dsn(_interpolated(one)).parts["user"] for one in service["environment"].values()}
        (user,) = users
        assert user in (["saf_owner"] if name.startswith("migrate-") else ROLES), name


@pytest.fixture
def gone_roles(server: EmbeddedServer) -> Iterator[None]:
    """Drops the roles of roles.sql after the databases."""
    yield
    with connect(server.dsn("postgres")) as connection:
        for role in ROLES:
            connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(role)))


@pytest.mark.full
@pytest.mark.usefixtures("gone_roles")
def test_the_compose_files_services_do_their_work_with_their_own_roles(
    new_database: Callable[[str], Dsn], tmp_path: Path
) -> None:
    places = {name: new_database(name) for name in DATABASES}
    # the roles of all databases of a server are the same; those of app are more
    given = {k: _interpolated(v) for k, v in SERVICES["app"]["environment"].items()}
    psql = [str(programs(DEFAULT_VERSION) / "psql"), "-X", "-v", "ON_ERROR_STOP=1", "-f"]
    done = run([*psql, str(DOCKER / "roles.sql"), places["app"].conninfo], env=given)
    assert done.returncode == 0, done.stderr
    for name in ("app", "mom"):
        for variable in ROLES.values():
            granting = "\n".join(SERVICES[f"migrate-{name}"]["command"])
            role = next(role for role in ROLES if ROLES[role] == variable)
            has = f"{variable}_PASSWORD" in SERVICES[name]["environment"]
            assert has is (f" {role}\n" in granting), (name, role)

    def once(name: str, *more: str) -> None:
        service = SERVICES[name]
        done = run([*_command(service), *more], env=_environment(service, places), cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    once("migrate-app")
    once("migrate-mom")
    once("flights-table")
    once("flights", "--limit", str(FLIGHTS))

    service = SERVICES["forwarder"]
    env = environment(
        **_environment(service, places),
        SAF_CONFIG=str(DOCKER / service["volumes"][0].split(":")[0]),
    )
    check = json.loads(_last("forwarder", "HEALTHCHECK").split("CMD", 1)[1])
    with (tmp_path / "stdout").open("w") as out, (tmp_path / "stderr").open("w") as err:
        forwarder = subprocess.Popen(
            _command(service), env=env, stdout=out, stderr=err, cwd=tmp_path
        )
        try:
            _until_received(places["mom"], FLIGHTS, forwarder)
            healthy = run(check, env=env, cwd=tmp_path)
            assert healthy.returncode == 0, healthy.stderr
            forwarder.send_signal(signal.SIGTERM)
            assert forwarder.wait(60) == 0
        finally:
            forwarder.kill()
            forwarder.wait()
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_the_health_check_fails_while_a_database_is_away(tmp_path: Path) -> None:
    nowhere = "postgresql://saf_forwarder@127.0.0.1:1/saf"
    check = json.loads(_last("forwarder", "HEALTHCHECK").split("CMD", 1)[1])
    done = run(
        check,
        env={
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "SAF_CONFIG": str(DOCKER / "saf.toml"),
            "APP_DSN": nowhere,
            "MOM_DSN": nowhere,
        },
        cwd=tmp_path,
    )
    assert done.returncode == 75


def test_dockers_saf_toml_needs_only_what_compose_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICES["forwarder"]["environment"].items():
        monkeypatch.setenv(name, _interpolated(value))
    settings = load(DOCKER / "saf.toml")
    assert set(settings.brokers) == {"app"}
    assert settings.forwarder.default_destination in settings.destinations


@pytest.mark.full
def test_the_build_stage_builds_the_wheel_from_what_it_copies(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for line in _all("build", "COPY"):
        *names, target = line.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, ignore=ignore)
            else:
                (source / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / target)
    (command,) = _all("build", "RUN")
    words = [word.replace("/wheels", str(tmp_path / "wheels")) for word in shlex.split(command)]
    done = run([sys.executable, "-m", *words], cwd=source)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "wheels").glob("saf_outbox-*-py3-none-any.whl"))) == 1


def test_the_docker_context_holds_what_is_copied_and_nothing_else() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line]
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = {
        name
        for stage in STAGES
        for line in _all(stage, "COPY")
        if "--from" not in line
        for name in line.split()[:-1]
    }
    assert "*" in rules
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_no_container_of_ours_runs_as_root() -> None:
    for service in OURS.values():
        assert int(_last(service["build"]["target"], "USER")) > 0
        assert service["cap_drop"] == ["ALL"]


def test_nothing_secret_is_part_of_the_image() -> None:
    instructions = [f"{name} {rest}" for stage in STAGES.values() for name, rest in stage]
    assert not [line for line in instructions if re.search(r"(?i)passw|secret|token|dsn", line)]


def _until_received(mom: Dsn, count: int, forwarder: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    with mom.connect(role="test", autocommit=True) as connection:
        while connection.execute("SELECT count(*) FROM saf.inbox").fetchone() != (count,):
            assert forwarder.poll() is None, "the forwarder has ended"
            assert time.monotonic() < deadline, "the forwarder takes too long"
            time.sleep(0.2)
