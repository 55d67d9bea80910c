"""docs/airflow.md, and what of saf-airflow can be checked without Airflow."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from saf.cli.console import EXIT_CODES
from saf.config import load
from saf.database import Dsn
from saf.errors import Unavailable, UsageError
from tests.pages import blocks, page, prepared, shell
from tests.programs import ROOT, saf, send

PAGE = page("airflow.md")
PACKAGE = ROOT / "airflow"
MODULES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("saf_airflow/*.py")}


def test_the_commands_of_the_page_say_that_all_is_forwarded(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    prepared(tmp_path, app, mom)
    send(app, 2)
    said = shell("".join(blocks(PAGE, "shell")), tmp_path, app, mom)
    assert "is forwarded" in said
    assert '"forwarded": true' in said


def test_the_code_of_the_page_is_python_and_names_what_the_package_has() -> None:
    public = ast.literal_eval(
        next(
            node.value
            for node in MODULES["__init__"].body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
    )
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code) == 6
    for one in code:
        for node in ast.walk(ast.parse(one)):
            if isinstance(node, ast.ImportFrom) and node.module == "saf_airflow":
                assert {alias.name for alias in node.names} <= set(public)


def test_the_package_needs_airflow_and_nothing_of_saf() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[><=]", one)[0] for one in project["dependencies"]] == ["apache-airflow"]
    imported = set()
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
    # OpenLineage only where OpenLineage calls
    assert imported - set(sys.stdlib_module_names) == {"airflow", "openlineage", "saf_airflow"}
    for tree in MODULES.values():
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "openlineage" not in ast.unparse(node)


def test_the_settings_of_the_page_name_the_variables_of_its_connection(
    app: Dsn, mom: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toml,) = blocks(PAGE, "toml")
    (tmp_path / "saf.toml").write_text(toml)
    (named,) = re.findall(r"\| DSNs from connections \| `(\{.*\})` \|", PAGE)
    dsns = (app.conninfo, mom.conninfo)
    for variable, dsn in zip(json.loads(named), dsns, strict=True):
        monkeypatch.setenv(variable, dsn)
    settings = load(tmp_path / "saf.toml")
    assert (set(settings.brokers), set(settings.destinations)) == ({"shop"}, {"mom"})


def test_the_commands_that_the_hook_runs_on_the_page_exist() -> None:
    for words in re.findall(r'SafHook\("saf"\)\.run\((.*)\)', PAGE):
        command, *options = ast.literal_eval(f"[{words}]")
        assert {*options} <= {*re.findall(r"--[a-z-]+", saf(command, "--help").stdout)}


def test_its_exit_codes_and_options_are_those_of_the_commands() -> None:
    codes = next(
        ast.literal_eval(node.value)
        for node in MODULES["command"].body
        if isinstance(node, ast.Assign) and "TRY_AGAIN" in ast.unparse(node.targets[0])
    )
    assert codes == (Unavailable.exit_code, UsageError.exit_code)
    assert set(codes) <= set(EXIT_CODES)
    for module, command in (
        ("forward", ["forward"]),
        ("pending", ["outbox", "list"]),
        ("forwarded", ["outbox", "forwarded"]),
    ):
        there = set(re.findall(r"--[a-z-]+", saf(*command, "--help").stdout))
        words = {
            node.value
            for node in ast.walk(MODULES[module])
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"--[a-z-]+", node.value)
        }
        assert words
        assert words <= there, module
