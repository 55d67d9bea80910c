"""`saf forward` does little work in its own process, and starts Spark for what is more."""

from __future__ import annotations

from pathlib import Path

import pytest

from saf.database import Dsn
from saf.forwarding.broker import LITTLE
from tests.pipeline import connect
from tests.programs import configuration, last_json, received, saf, send

DONE, OTHER = 0, 1

BROKEN = {"spark.driver.memory": "as much as there is"}
"""Settings with which Spark does not start, so that whoever starts it is told."""


@pytest.fixture
def config(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with file.open("a") as settings:
        settings.write("[forwarder.spark]\n")
        settings.writelines(f'"{name}" = "{value}"\n' for name, value in BROKEN.items())
    return file


def test_little_work_needs_no_spark(config: Path, app: Dsn, mom: Dsn) -> None:
    sent = send(app, 30)

    done = saf("forward", "--config", config, "--json")

    assert done.returncode == DONE, done.stderr
    assert last_json(done.stdout)["forwarded"] == 30
    assert sorted(body for _, body in received(mom)) == sorted(sent)


@pytest.mark.parametrize("more", ["much", "classifier", "always"])
def test_what_is_more_than_little_starts_spark(config: Path, app: Dsn, more: str) -> None:
    send(app, LITTLE + 1 if more == "much" else 1)
    if more == "classifier":
        with connect(app) as connection:
            connection.execute(
                "INSERT INTO saf.router (service, kind, expression) VALUES ('orders', 'sql', 'key')"
            )
    options = ["--spark", "always"] if more == "always" else []

    done = saf("forward", "--config", config, *options)

    assert done.returncode == OTHER, done.stdout
    assert "Spark's JVM did not start" in done.stderr
