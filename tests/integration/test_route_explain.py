"""`saf route explain` asks destinations whether they have the service."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from saf.broker.services import create_service
from saf.database import Dsn
from tests.pipeline import connect
from tests.programs import configuration as configure
from tests.programs import last_json, saf

TRY_AGAIN = 75


@pytest.fixture
def folder(app: Dsn, mom: Dsn, new_broker: Any, tmp_path: Path) -> Path:
    """With a saf.toml of one source, shop, and the destinations mom and erp."""
    configure(tmp_path / "saf.toml", {"shop": app}, {"mom": mom, "erp": new_broker("erp")})
    return tmp_path


def test_explain_asks_the_destination_whether_it_has_the_service(folder: Path, mom: Dsn) -> None:
    with connect(mom) as store:
        create_service(store, "billing")
    assert saf("route", "explain", "billing", cwd=folder).returncode == 0
    done = saf("route", "explain", "biling", cwd=folder)
    assert done.returncode == TRY_AGAIN
    create = "saf service create biling --broker mom"
    sentence = f"mom has no service 'biling'. Did you mean 'billing'? Create it: `{create}`"
    assert done.stdout.splitlines()[-1] == sentence
    told = last_json(saf("route", "explain", "biling", "--json", cwd=folder).stdout)
    assert told["no_service"] == {"mom": sentence}
    assert saf(*shlex.split(create)[1:], cwd=folder).returncode == 0
    assert saf("route", "explain", "biling", cwd=folder).returncode == 0


def test_a_service_without_a_route_is_shown_with_the_command_that_adds_one(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    config = configure(tmp_path / "one.toml", {"shop": app}, {"ledger": mom})
    config.write_text(re.sub("default_destination.*\n", "", config.read_text()))
    assert saf("route", "add", "ledger", "--service", "billing", "--config", config).returncode == 0
    done = saf("route", "explain", "biling", "--config", config)
    command = "saf route add ledger --service biling --broker shop"
    assert f"Did you mean 'billing'? Add one: `{command}`\n" in done.stdout
    text = config.read_text().replace(
        "[destinations.ledger]",
        '[destinations.erp]\ndsn = "host=/nonexistent dbname=erp"\n\n[destinations.ledger]',
    )
    config.write_text(text)
    done = saf("route", "explain", "feeds", "--config", config)
    command = "saf route add DESTINATION --service feeds --broker shop"
    assert f"`{command}`; DESTINATION is one of erp, ledger\n" in done.stdout
    done = saf("route", "add", "mom", "--config", config)
    assert "no [destinations.mom] in saf.toml, only erp, ledger" in done.stderr


def test_explain_says_which_destination_could_not_be_asked(folder: Path, app: Dsn) -> None:
    gone = Dsn("host=/nonexistent dbname=mom")
    config = configure(folder / "gone.toml", {"shop": app}, {"mom": gone})
    done = saf("route", "explain", "billing", "--config", config)
    assert done.returncode == 0, "the route is known"
    unknown = "saf: whether mom has the service is not known: database dbname=mom "
    assert unknown in done.stderr
