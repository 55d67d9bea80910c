"""The models of docs/model: a part of what `make model` checks, and what their page says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.models.__main__ import as_expected, sentence
from tests.models.checking import MODELS, NEEDED, check, files
from tests.models.runs import PLANTED, PROVEN, Run
from tests.mutants.mutant import ROOT
from tests.needed import needed
from tests.programs import run as run_program

PAGE = (ROOT / "docs" / "model.md").read_text()
TEXTS = {file.stem: file.read_text() for file in files()}
INCLUDED = {"forwarding": "destination"}


def runs(model: str) -> list[Run]:
    return [run for run in (*PROVEN, *PLANTED) if run.gate and run.model == model]


def switches(model: str) -> set[str]:
    """The planted errors that a model and what it includes have."""
    text = TEXTS[model] + TEXTS.get(INCLUDED.get(model, ""), "")
    return set(re.findall(r"(?:ifdef|defined\()\s*(\w+)\)?\s*/\* planted", text))


@pytest.mark.full
@pytest.mark.parametrize("model", sorted({run.model for run in PROVEN}))
def test_a_model_is_proven_and_its_planted_errors_are_found(model: str) -> None:
    for run in runs(model):
        checked = check(run)
        assert as_expected(run, checked), f"{sentence(run, checked)}\n{checked.said}"


def test_each_model_and_each_planted_error_is_checked() -> None:
    assert {run.model for run in PROVEN} == TEXTS.keys() - INCLUDED.values()
    for model in TEXTS.keys() - INCLUDED.values():
        checked = {one for run in PLANTED if run.model == model for one in run.switches}
        assert switches(model) - checked == set()


def test_the_page_shows_each_planted_error_and_what_it_leads_to() -> None:
    told = re.findall(r"^\| (\w+) \| `([^`|]+)` \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert told == [(run.model, " ".join(run.switches), run.finds) for run in PLANTED]


@pytest.mark.full
def test_the_page_shows_how_to_replay_what_leads_to_an_error(tmp_path: Path) -> None:
    for program, package in NEEDED.items():
        needed(program, package)
    (found,) = re.findall(r"<!-- test: replay -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    done = run_program(["bash", "-e", "-c", found], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "assertion violated" in done.stdout.partition("pan: wrote")[0]
    assert "trail ends after" in done.stdout


def test_what_stands_for_a_step_is_there() -> None:
    table = PAGE.partition("## What stands for what\n")[2].partition("\n## ")[0]
    names = re.findall(r"`(saf\.[\w.]+)`", table)
    assert len(names) > 40
    for name in names:
        assert found(name), f"docs/model.md names {name}, which is not there"


def found(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        there: Any = module
        for part in parts[length:]:
            there = getattr(there, part, None)
        return there is not None
    return False


def test_words_beside_an_assertion_name_what_it_looks_at() -> None:
    for file in files():
        for line in file.read_text().splitlines():
            if "assert(" in line:
                assert re.search(r"/\* [\w' ]+ \*/$", line), f"{file.relative_to(MODELS)}: {line}"
