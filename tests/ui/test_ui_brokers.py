"""How pages ask brokers: those that are down hold up no other, and fleets nobody."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from saf.config import Broker, Fleet, Settings
from saf.database import Dsn
from saf.errors import ConfigurationError, Unavailable
from saf.operating import places
from saf.operating.places import Places
from saf.ui.brokers import Brokers
from tests.dashboard import dashboard, settings
from tests.pipeline import connect
from tests.silence import Silence, mute
from tests.waits import until


@pytest.mark.full
def test_brokers_whose_host_drops_packets_hide_none_that_is_healthy(app: Dsn) -> None:
    with mute() as gone:
        there = {f"gone {n}": Broker(dsn=gone) for n in range(60)} | {"shop": Broker(dsn=app)}
        brokers = Brokers(lambda: there)
        try:
            for _ in range(2):
                answers = brokers.ask(lambda connection: connection.info.dbname, seconds=4)
                assert answers.found == {"shop": app.database}
                assert len(answers.errors) == 60
                brokers._down = {name: (why, 0.0) for name, (why, _) in brokers._down.items()}
        finally:
            brokers.close()


def given_fleets(**fleets: Fleet) -> Settings:
    return Settings.model_construct(brokers={}, fleets=fleets, destinations={})


def registry(dsn: Dsn, name: str) -> str:
    """A fleet of saf.toml that lists one broker, its own server."""
    query = f"SELECT '{name}', '{dsn.conninfo}'"
    return f'dsn = "{dsn.conninfo}"\nquery = "{query}"\n'


def test_a_fleet_whose_server_hangs_holds_up_no_page_and_hides_no_other_fleet(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    with mute() as gone:
        fleets = f'[fleets.hangs]\ndsn = "{gone.conninfo}"\ndatabases = "*"\n'
        fleets += f"[fleets.shops]\n{registry(app, 'acme')}"
        given = settings(tmp_path / "saf.toml", {"shop": app}, {"mom": mom}, fleets)
        with dashboard(given) as there:
            visitor = there.client()
            for page in ("/dead", "/audit", "/parked"):
                began = time.monotonic()
                assert "shops/acme" in visitor.get(page).text
                assert time.monotonic() - began < 8, "a connection may take 10 s"


def test_a_fleet_that_falls_silent_is_as_it_was_known(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "REFRESH_SECONDS", 0.0)
    with closing(Silence(app)) as silence:
        fleet = Fleet(dsn=silence.dsn, query="SELECT 'acme', 'dbname=x'")
        there = Places(given_fleets(shops=fleet), None)
        assert there().keys() == {"shops/acme"}
        silence.fall()
        for _ in range(20):
            began = time.monotonic()
            assert there().keys() == {"shops/acme"}
            assert time.monotonic() - began < 5
            time.sleep(0.01)
        fleets = [one.name for one in threading.enumerate() if one.name == "saf-fleet"]
        assert len(fleets) == 1, "who has not answered is not asked once more"


def test_a_fleet_that_has_answered_is_asked_again(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "REFRESH_SECONDS", 0.0)
    with connect(app) as connection:
        connection.execute("CREATE TABLE shops AS SELECT 'acme' AS name, 'dbname=x' AS dsn")
        there = Places(given_fleets(shops=Fleet(dsn=app, query="TABLE shops")), None)
        assert there().keys() == {"shops/acme"}
        connection.execute("INSERT INTO shops VALUES ('zeta', 'dbname=y')")
        until(lambda: there().keys() == {"shops/acme", "shops/zeta"})
        connection.execute("TRUNCATE shops")
        until(lambda: there().keys() == set())


def test_a_fleet_that_is_meant_alone_and_is_not_there_is_said(app: Dsn) -> None:
    gone = Fleet(dsn=Dsn("host=/nonexistent dbname=x"), databases="*")
    shops = Fleet(dsn=app, query="SELECT 'acme', 'dbname=x'")
    settings = given_fleets(gone=gone, shops=shops)
    with pytest.raises(Unavailable):
        Places(settings, "gone", first_seconds=None)()
    with pytest.raises(ConfigurationError, match="not in the fleet"):
        Places(settings, "shops/zeta", first_seconds=None)()
    with pytest.raises(ConfigurationError, match=r"no \[brokers.nobody\]"):
        Places(settings, "nobody")
    assert Places(settings, "shops/acme", first_seconds=None)().keys() == {"shops/acme"}
    assert Places(settings, None, first_seconds=None)().keys() == {"shops/acme"}


def test_brokers_are_counted_at_a_time_before_a_decision(app: Dsn, tmp_path: Path) -> None:
    brokers = {f"shop {number}": app for number in range(8)}
    with (
        dashboard(settings(tmp_path / "saf.toml", brokers, {"mom": app})) as there,
        connect(app) as holder,
        holder.transaction(),
    ):
        visitor = there.client()
        csrf = visitor.csrf("/")
        holder.execute("LOCK TABLE saf.dead_letter, saf.parked IN ACCESS EXCLUSIVE MODE")
        for page in ("/dead/confirm", "/parked/messages/confirm"):
            there.site.brokers._down.clear()
            form = {"csrf": csrf, "action": "discard", "matching": "yes"}
            began = time.monotonic()
            assert visitor.post(page, data=form).text.count("has not answered") >= 8
            assert time.monotonic() - began < 9, "one after the other, each takes 1.5 s"
