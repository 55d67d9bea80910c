"""`saf.django`, as its users have it: a project, its manage.py and its test runners."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from saf.broker.embedded import DEFAULT_VERSION
from saf.database import REVISION, Dsn, fetch
from tests.conftest import Servers
from tests.pages import blocks
from tests.pipeline import connect, forward
from tests.programs import ROOT, activated, environment, run

EXAMPLE = ROOT / "examples" / "with_django"
SUITE = ROOT / "tests" / "django_suite"
PATIENCE = 600
"""Seconds for a program: a busy machine is slow."""

pytestmark = pytest.mark.timeout(2 * PATIENCE)

PAGE = (ROOT / "docs" / "django.md").read_text()

RUNS = (("serialized",), ("schema", "receiving", "tasks", "admin"))
"""The files of the suite: what each run of pytest gets."""
INNER = [
    f"{name}::{node.name}"
    for name in (one for names in RUNS for one in names)
    for node in ast.parse((SUITE / f"{name}.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


def env_of(dsn: Dsn) -> dict[str, str]:
    return {
        "SHOP_DB": dsn.database,
        "SHOP_HOST": str(dsn.parts["host"]),
        "SHOP_PORT": str(dsn.parts.get("port", "")),
        "SHOP_USER": str(dsn.parts["user"]),
    }


class Project:
    """A copy of the example, with its own database, which is not migrated."""

    def __init__(self, folder: Path, dsn: Dsn) -> None:
        self.folder = shutil.copytree(EXAMPLE, folder / "project")
        self.dsn = dsn
        self.env = env_of(dsn)

    def manage(
        self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "manage.py", *arguments]
        done = run(command, cwd=self.folder, env={**self.env, **(env or {})}, timeout=PATIENCE)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "manage.py", *arguments],
            cwd=self.folder,
            env=environment(**self.env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def place(self, number: str, total: int) -> None:
        code = f"from shop.models import place; place({number!r}, {total})"
        self.manage("shell", "-c", code)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with connect(self.dsn) as connection:
            return fetch(connection, query)


@pytest.fixture
def project(tmp_path: Path, new_database: Callable[[str], Dsn]) -> Project:
    return Project(tmp_path, new_database("django"))


@pytest.fixture
def migrated_project(project: Project) -> Project:
    project.manage("migrate", "--verbosity", "0")
    return project


# Each promise inside the test runner, in one run


@pytest.fixture(scope="module")
def suite(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The complaint of each test of the suite; empty if it has passed."""
    databases = servers[DEFAULT_VERSION].databases
    database = databases.create("suite")
    project = Project(tmp_path_factory.mktemp("suite"), database.dsn)
    for file in SUITE.glob("*.py"):
        shutil.copy(file, project.folder)
    options = ["-p", "saf.testing", "-p", "no:cacheprovider", "-q", "-W", "error"]
    found: dict[str, str] = {}
    try:
        for names in RUNS:
            report = project.folder / "report.xml"
            subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", *options, "--ds=shop.settings"),
                    *(f"--junitxml={report}", *(f"{name}.py" for name in names)),
                ],
                cwd=project.folder,
                env=environment(**project.env),
                timeout=PATIENCE,
                check=False,
            )
            for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - our own
                test = str(case.get("name")).partition("[")[0]
                name = f"{case.get('classname')}::{test}"
                output = [
                    one.text or "" for one in case if one.tag in ("failure", "error", "skipped")
                ]
                found[name] = found.get(name, "") + "\n".join(output)
        yield found
        left = databases._run(
            "SELECT datname FROM pg_database WHERE datname = %(name)s",
            {"name": f"test_{database.dsn.database}"},
        ).fetchall()
        assert left == [], "the test runner could not drop its database"
    finally:
        databases.drop(database)


@pytest.mark.parametrize("name", INNER)
def test_inside_of_djangos_test_runner(suite: dict[str, str], name: str) -> None:
    assert suite[name] == ""


# The example, step by step


def test_migrate_brings_the_schema_before_the_projects_own_migrations(project: Project) -> None:
    output = project.manage("migrate").stdout
    assert output.index(f"saf: schema {REVISION} is in place") < output.index("Applying shop.0001")
    assert project.rows("SELECT version_num FROM saf.alembic_version") == [(REVISION,)]
    assert project.rows("SELECT name FROM saf.service ORDER BY 1") == [
        ("billing",),
        ("tasks.default",),
    ]
    assert "saf: schema" not in project.manage("migrate").stdout
    assert "No changes detected" in project.manage("makemigrations", "--check").stdout
    project.manage("check", "--database", "default")


def test_the_projects_tests_pass_and_their_database_is_dropped(project: Project) -> None:
    output = project.manage("test").stderr
    assert re.search(r"Ran 4 tests .*\n\nOK\n", output)
    assert "Destroying test database" in output


def test_the_projects_tests_pass_by_parallel_processes(project: Project) -> None:
    assert "\nOK\n" in project.manage("test", "--parallel", "2").stderr


def test_an_order_is_placed_its_label_printed_and_its_invoice_written(
    migrated_project: Project,
) -> None:
    project = migrated_project
    project.place("A-1", 90)
    done = project.manage("saf_tasks", "--drain")
    assert "order A-1: 90" in done.stdout
    assert "handled 1 message" in done.stdout
    forward(project.dsn, here=project.dsn)
    done = project.manage("saf_worker", "shop.consumers:worker", "--drain")
    assert "handled 1 message" in done.stdout
    assert project.rows('SELECT "order", total FROM shop_invoice') == [("A-1", 90)]


def test_without_migrations_the_schema_is_there_too(project: Project) -> None:
    project.write(
        "settings_plain.py", "from shop.settings import *\nMIGRATION_MODULES = {'shop': None}\n"
    )
    project.manage("migrate", "--run-syncdb", "--settings", "settings_plain")
    assert project.rows("SELECT version_num FROM saf.alembic_version") == [(REVISION,)]


def test_a_router_keeps_the_schema_out_and_other_databases_are_left_alone(project: Project) -> None:
    project.write(
        "settings_routed.py",
        "from shop.settings import *\n"
        "DATABASE_ROUTERS = ['settings_routed.Router']\n"
        "DATABASES['lite'] = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'lite.db'}\n"
        "TASKS = {}\n"
        "class Router:\n"
        "    def allow_migrate(self, db, app_label, **hints):\n"
        "        return app_label not in ('saf', 'shop')\n",
    )
    for alias in ("default", "lite"):
        output = project.manage(
            "migrate", "--database", alias, "--settings", "settings_routed"
        ).stdout
        assert "saf" not in output
    assert project.rows("SELECT to_regnamespace('saf')::text") == [(None,)]


def test_a_role_that_may_not_migrate_is_told_so_without_a_traceback(
    project: Project, new_role: Callable[..., str]
) -> None:
    role = new_role()
    done = project.manage("migrate", code=1, env={"SHOP_USER": role})
    assert f"this user may not migrate database '{project.dsn.database}'" in done.stderr


def test_without_the_app_the_error_of_a_send_names_it(project: Project) -> None:
    project.write(
        "settings_bare.py",
        "from shop.settings import *\nINSTALLED_APPS = ['shop']\nTASKS = {}\n",
    )
    send = (
        "from django.db import connection, transaction; from shop.models import outbox\n"
        "with transaction.atomic(): outbox.send(connection, 'billing', b'')"
    )
    command = [sys.executable, "manage.py", "shell", "--settings", "settings_bare", "-c", send]
    done = run(command, cwd=project.folder, env=project.env, tracebacks=True)
    assert "add 'saf.django' to INSTALLED_APPS, and run `manage.py migrate`" in done.stderr


@pytest.mark.parametrize("more", ["", "-n1"])
def test_the_tests_of_the_page_pass(project: Project, more: str) -> None:
    (code,) = blocks(PAGE, "test_shop.py")
    project.write("test_shop.py", code)
    project.write("conftest.py", 'pytest_plugins = ["saf.testing"]\n')
    options = ["-q", "-p", "no:cacheprovider", "--ds=shop.settings", *filter(None, [more])]
    command = [sys.executable, "-m", "pytest", *options]
    done = run(command, cwd=project.folder, env=project.env)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_commands_of_the_page_run(project: Project) -> None:
    commands = "\n".join(blocks(PAGE, "shell"))
    settings = "shop/settings.py"
    text = (project.folder / settings).read_text()
    project.write(settings, text + "TASKS['default']['QUEUES'] = ['default', 'mail']\n")
    done = run(
        [
            "bash",
            "-euxc",
            commands.replace(" --queue", " --drain --queue").replace(
                "shop.consumers:worker", "--drain shop.consumers:worker"
            ),
        ],
        cwd=project.folder,
        env={**project.env, "PATH": activated()},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("handled 0 messages") == 2


# A worker as a process


def wait_for(project: Project, query: str, expected: object, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while project.rows(query) != [(expected,)]:
        assert time.monotonic() < deadline, query
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGINT, "1"), (signal.SIGTERM, "1"), (signal.SIGTERM, "2")],
)
def test_a_worker_handles_messages_until_it_is_told_to_stop(
    migrated_project: Project, number: int, processes: str
) -> None:
    project = migrated_project
    worker = project.start("saf_worker", "shop.consumers:worker", "--processes", processes)
    try:
        project.place("A-1", 90)
        forward(project.dsn, here=project.dsn)
        wait_for(project, "SELECT count(*) FROM shop_invoice", 1)
        if number == signal.SIGINT:
            os.killpg(worker.pid, number)  # as a terminal does
        else:
            worker.send_signal(number)
        output, complaints = worker.communicate(timeout=PATIENCE)
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
    assert worker.returncode == 0, complaints
    assert "Traceback" not in output + complaints
    # a process that is told before it has begun has no summary
    assert 1 <= output.count("handled") <= int(processes)


INTERRUPTED_TWICE = """
import atexit, os, signal
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("module", ["models", "consumers"])
def test_a_worker_that_is_interrupted_while_it_starts_ends_in_silence(
    migrated_project: Project, module: str
) -> None:
    project = migrated_project
    file = project.folder / "shop" / f"{module}.py"
    file.write_text(file.read_text() + INTERRUPTED_TWICE)
    done = project.manage("saf_worker", "shop.consumers:worker", code=130)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_worker_receives_from_the_database_of_an_alias(migrated_project: Project) -> None:
    project = migrated_project
    project.write(
        "elsewhere.py",
        "import saf\n"
        "worker = saf.Worker('dbname=nowhere', 'billing')\n"
        "@worker.handler()\n"
        "def on(message, connection): print(connection.alias)\n",
    )
    project.place("A-1", 90)
    forward(project.dsn, here=project.dsn)
    done = project.manage("saf_worker", "elsewhere:worker", "--drain", "--database", "default")
    assert done.stdout.startswith("default\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["saf_worker", "shop.nothing:worker"], "no module 'shop.nothing' here"),
        (["saf_worker", "shop.models:Order"], "neither saf.Worker nor saf.Processors"),
        (["saf_worker", "shop.consumers"], "expected MODULE:WORKER"),
        (["saf_tasks", "--queue", "mail"], "no queue 'mail', only 'default'"),
        (["saf_tasks", "--backend", "other"], "TASKS['other'] is not"),
    ],
)
def test_a_users_mistake_is_a_sentence_with_an_exit_code(
    migrated_project: Project, arguments: list[str], why: str
) -> None:
    assert why in migrated_project.manage(*arguments, code=2).stderr
