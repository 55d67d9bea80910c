"""Kinds of destinations: found by name, of whatever package; what they cannot is refused early."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import SecretStr

from saf.config import load
from saf.database import Dsn
from saf.destinations.jsonl import Jsonl
from saf.destinations.kinds import GROUP, OURS, known, settings_of
from saf.destinations.postgresql import Postgresql
from saf.destinations.settings import DestinationSettings
from saf.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
APP = '[brokers.app]\ndsn = "dbname=app"\n'
PLUGIN = """
from typing import Literal
from pydantic import SecretStr
from saf.destinations.settings import DestinationSettings

class Paper(DestinationSettings):
    kind: Literal["paper"] = "paper"
    password: SecretStr
    tray: int = 1
    stores = ("store", "Store")

class Blank(DestinationSettings):
    kind: Literal["blank"] = "blank"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "saf.toml"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's package, which is installed: it declares two kinds, and one cannot be imported."""
    folder = tmp_path / "site"
    info = folder / "paper_outbox-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper-outbox\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\npaper = paper_outbox:Paper\nbroken = paper_outbox.broken:Broken\n"
        "odd = paper_outbox:Literal\nblank = paper_outbox:Blank\n"
    )
    (folder / "paper_outbox").mkdir()
    (folder / "paper_outbox" / "__init__.py").write_text(PLUGIN)
    (folder / "paper_outbox" / "broken.py").write_text("import a_client_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "paper_outbox", raising=False)
    return folder


def refused(file: Path, text: str) -> str:
    file.write_text(APP + text)
    with pytest.raises(ConfigurationError) as caught:
        load(file)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said.removeprefix(f"{file}: ")


def test_our_own_kinds_are_declared_as_others_are() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert declared["project"]["entry-points"][GROUP] == OURS
    for name in OURS:
        assert settings_of(name).model_fields["kind"].default == name


def test_a_destination_is_an_inbox_unless_it_says_its_kind(file: Path, tmp_path: Path) -> None:
    file.write_text(
        f'{APP}[destinations.a]\ndsn = "dbname=a"\n'
        f'[destinations.b]\nkind = "jsonl"\nfolder = "{tmp_path}"\nquality = "at_least_once"\n'
    )
    there = load(file).destinations
    assert there["a"] == Postgresql(dsn=Dsn("dbname=a"), quality="exactly_once")
    assert there["b"] == Jsonl(folder=tmp_path, quality="at_least_once")
    assert (there["a"].broker(), there["b"].broker()) == (Dsn("dbname=a"), None)


def test_a_kind_that_is_not_known_is_refused_with_those_that_are(file: Path) -> None:
    said = refused(file, '[destinations.m]\nkind = "postgres"\ndsn = "dbname=m"')
    assert said == (
        f"destinations.m: unknown kind 'postgres', only {', '.join(sorted(OURS))}; is its package "
        "installed?"
    )
    assert "a kind is a text" in refused(file, "[destinations.m]\nkind = 5")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('kind = "jsonl"', "destinations.m.folder: Field required"),
        (
            'kind = "jsonl"\nfolder = "x"\nlock_second = 1',
            "unknown setting destinations.m.lock_second (did you mean 'lock_seconds'?)",
        ),
        ('dsn = "dbname=m"\nfolder = "x"', "unknown setting destinations.m.folder"),
        (
            'kind = "jsonl"\nfolder = "x"\nlock_seconds = 0',
            "destinations.m.lock_seconds: 0.0 is not from 0.01 to 86,400",
        ),
    ],
)
def test_each_kind_has_settings_of_its_own(file: Path, text: str, said: str) -> None:
    assert refused(file, f"[destinations.m]\n{text}") == said


@pytest.mark.usefixtures("package")
def test_another_package_adds_a_kind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known() == sorted(["blank", "broken", "odd", "paper", *OURS])
    monkeypatch.setenv("PAPER", "hunter2")
    file.write_text(f'{APP}[destinations.m]\nkind = "paper"\npassword = "${{PAPER}}"\n')
    settings = load(file)
    there = settings.destinations["m"]
    assert (there.kind, there.quality) == ("paper", "at_least_once")
    assert there.redact("it said: hunter2\n") == "it said: ***"
    for shown in (repr(settings), str(settings), settings.model_dump_json(), repr(there)):
        assert "hunter2" not in shown


@pytest.mark.usefixtures("package")
def test_what_cannot_be_imported_is_said_where_it_is_used_and_not_before(file: Path) -> None:
    file.write_text(f'{APP}[destinations.m]\ndsn = "dbname=m"\n')
    load(file)
    said = refused(file, '[destinations.m]\nkind = "broken"')
    assert said == (
        "destinations.m: kind 'broken' is of the package paper-outbox, which cannot be imported: "
        "ModuleNotFoundError: No module named 'a_client_that_is_not_installed'"
    )
    assert "which is not a class of settings" in refused(file, '[destinations.m]\nkind = "odd"')
    assert "kind 'blank' has neither `open` nor `stores`" in refused(
        file, '[destinations.m]\nkind = "blank"'
    )


@pytest.mark.usefixtures("package")
def test_exactly_once_is_refused_of_a_kind_that_cannot(file: Path) -> None:
    paper = '[destinations.m]\nkind = "paper"\npassword = "x"\n'
    said = "a destination of kind 'paper' cannot store exactly once: set 'at_least_once'"
    assert refused(file, f'{paper}quality = "exactly_once"') == f"destinations.m.quality: {said}"
    route = '[[routes]]\ndestination = "m"\nquality = '
    assert refused(file, f'{paper}{route}"exactly_once"') == f"routes.0.quality: {said}"
    file.write_text(f'{APP}{paper}{route}"at_most_once"')
    load(file)


@pytest.mark.parametrize("name", ["password", "api_token", "amqp_url", "sasl_password"])
def test_a_field_that_may_hold_a_secret_has_to_be_one(name: str) -> None:
    types: dict[str, Any] = {"kind": Literal["x"], name: str | None}
    fields: dict[str, Any] = {"__annotations__": types, "kind": "x", name: None}
    with pytest.raises(TypeError, match=f"X.{name} may hold a secret"):
        type("X", (DestinationSettings,), {**fields, "__module__": __name__})
    fields["__annotations__"] = {"kind": Literal["x"], name: SecretStr | None}
    type("X", (DestinationSettings,), {**fields, "__module__": __name__})
