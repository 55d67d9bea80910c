"""The wheel, in a virtual environment that has nothing else."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saf.database import REVISION, Dsn
from saf.destinations.kinds import GROUP, OURS
from tests.programs import ROOT, configuration, last_json, received, run, send

ABSENT = """
import importlib.util, saf
print(saf.__file__)
print([n for n in ("pyspark", "pyarrow", "adbc_driver_postgresql") if importlib.util.find_spec(n)])
"""

SENDER = """
import os, psycopg, saf
with psycopg.connect(os.environ["DSN"]) as connection:
    saf.Outbox().send(connection, "billing", "from the wheel", key="order 1")
"""

RELEASE = {"SAF_REPOSITORY": "https://example.com/saf/", "SAF_REVISION": "v9"}

pytestmark = pytest.mark.timeout(600)


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run one of its programs; with nothing of the checkout on the path."""
        command = [self.folder / "bin" / program, *arguments]
        return run(command, env={"PYTHONPATH": ""}, cwd=self.folder, timeout=200)

    def add_packages_of_this_one(self) -> None:
        """What this Python has installed can be imported too, after what it has itself."""
        packages = self.folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        # a path in a .pth file is not searched for .pth files, so the checkout stays out of sight
        (packages / "heavy.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout as a release is."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = run(command, env={**os.environ, **RELEASE}, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The base install: without extras."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    # this environment's pip, which saves installing another one first
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
    done = run([*command, "--quiet", str(wheel)], timeout=200)
    assert done.returncode == 0, done.stderr
    return Environment(folder)


@pytest.mark.full
def test_the_wheel_migrates_sends_and_forwards_where_only_it_is_installed(
    installed: Environment,
    new_database: Callable[[str], Dsn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, mom = new_database("app"), new_database("mom")

    location, found = installed("python", "-c", ABSENT).stdout.splitlines()
    assert location.startswith(str(installed.folder))
    assert found == "[]"

    for dsn in (app, mom):
        done = installed("saf", "migrate", "--dsn", dsn.conninfo)
        assert done.returncode == 0, done.stderr
        assert f"saf schema {REVISION}" in done.stdout

    monkeypatch.setenv("DSN", app.conninfo)
    done = installed("python", "-c", SENDER)
    assert done.returncode == 0, done.stderr

    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, master="local[1]")
    done = installed("saf", "forward", "--config", config)
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "pip install 'saf-outbox[forwarder]'" in sentence
    assert installed("saf", "status", "--config", config).returncode == 0
    done = installed("saf", "demo")
    assert done.returncode == 2
    assert "pip install 'saf-outbox[demo]'" in done.stderr

    installed.add_packages_of_this_one()
    location, found = installed("python", "-c", ABSENT).stdout.splitlines()
    assert location.startswith(str(installed.folder))
    assert "pyspark" in found
    send(app, 10)
    done = installed("saf", "forward", "--config", config, "--json")
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout)["forwarded"] == 11
    assert len(received(mom)) == 11

    # not tmp_path, whose name is too long for a unix socket
    with tempfile.TemporaryDirectory(prefix="saf-demo-") as folder:
        done = installed("saf", "demo", "--dialog", "--json", "--data", folder)
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout)["right"]


@pytest.mark.full
def test_the_package_s_page_leads_to_the_sources_of_its_version(installed: Environment) -> None:
    (about,) = installed.folder.glob("lib/python*/site-packages/saf_outbox-*.dist-info/METADATA")
    text = about.read_text()
    assert "Project-URL: Source, https://example.com/saf\n" in text
    assert "](https://example.com/saf/blob/v9/docs/first-hour.md)" in text
    assert "](https://example.com/saf/raw/v9/docs/pictures/architecture.svg)" in text
    assert not re.findall(r"\]\((?!https://|#)[^)]*\)", text)


def test_without_an_address_a_package_has_the_readme_as_it_is() -> None:
    spec = importlib.util.spec_from_file_location("links", ROOT / "packaging" / "links.py")
    assert spec is not None
    assert spec.loader is not None
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    metadata: dict[str, Any] = {}
    links.Links(str(ROOT), {}).update(metadata)
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text()
    assert metadata["urls"] == {}


def test_workflows_are_what_their_schema_says() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    done = run([*command, "vendor.github-workflows", *map(str, workflows)])
    assert workflows
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_is_built_without_what_the_tests_need() -> None:
    steps = run(["make", "-n", "wheel"], cwd=ROOT).stdout
    assert "build --wheel" in steps
    assert "--editable" not in steps
    assert "[dev]" not in steps


@pytest.mark.full
def test_the_wheel_is_typed_and_the_heavy_packages_come_with_the_extra_only(
    installed: Environment,
) -> None:
    (package,) = installed.folder.glob("lib/python*/site-packages/saf")
    assert (package / "py.typed").is_file()
    assert (package / "testing" / "__init__.py").is_file()
    assert (package / "saf.toml").read_text() == (ROOT / "jobs" / "saf.toml").read_text()
    (about,) = package.parent.glob("saf_outbox-*.dist-info/METADATA")
    declared = configparser.ConfigParser()
    declared.read(about.with_name("entry_points.txt"))
    assert dict(declared[GROUP]) == OURS
    needs = [line for line in about.read_text().splitlines() if line.startswith("Requires-Dist")]
    for name in ("adbc-driver-postgresql", "pandas", "pyarrow", "pyspark"):
        mine = [need for need in needs if re.match(rf"Requires-Dist: {name}\W", need + " ")]
        assert mine
        assert all("extra ==" in need for need in mine)
        assert any("extra == 'forwarder'" in need for need in mine)
