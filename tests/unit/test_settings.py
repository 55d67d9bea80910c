"""saf.toml: what contradicts itself is refused by its name, and a password is only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from saf.config import load
from saf.errors import ConfigurationError

WHOLE = """
[brokers.app]
dsn = "dbname=app"
[destinations.mom]
dsn = "dbname=mom"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "saf.toml"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('[[routes]]\ndestination = "mom"\n' * 2, "routes.1 is the same route as routes.0"),
        ('[[routes]]\ndestination = "nom"', r"routes.0.destination is 'nom'.*did you mean 'mom'"),
        (
            '[topics.x]\n[routers.x]\nkind = "python"\nexpression = "a:b"',
            "routers.x is a topic too",
        ),
        ('[routers.x]\nkind = "python"\nexpression = "nothing"', "routers.x: "),
        (
            '[fleets.f]\ndsn = "dbname=x"\ndatabases = "*"\nquery = "SELECT"',
            "either databases = or query =",
        ),
        ('[fleets.f]\ndsn = "dbname=x"', "either databases = or query ="),
        ('[endpoints.x]\nurl = "ftp://x"', "endpoints.x.url: it is not a URL such as https://"),
        ('[endpoints.x]\nurl = "http://a:b@x"', "a URL must not contain user and password"),
        ('[endpoints.x]\nurl = "http://x"\nbroker = "nom"', "did you mean 'mom'"),
        ('[endpoints.x]\nurl = "http://x"\nrate = "0/s"', "'0/s' is not a rate such as"),
        ('[endpoints.x]\nurl = "http://x"\nmethod = "f"', "and method belong together"),
        ('[endpoints.x]\nurl = "http://x"\nuser = "me"', "user and password belong together"),
        ('[endpoints.x]\nurl = "http://x"\nsecret = "me"', "did you mean 'secrets'"),
        (
            '[fleets.f]\ndsn = "dbname=x"\ndatabases = "*"\n[brokers."f/one"]\ndsn = "dbname=one"',
            "brokers.f/one: names like this belong to the fleet",
        ),
        (
            '[fleets."a/b"]\ndsn = "dbname=x"\ndatabases = "*"',
            "a fleet's name must not contain '/'",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_name(file: Path, more: str, said: str) -> None:
    file.write_text(WHOLE)
    load(file)
    file.write_text(WHOLE + more)
    with pytest.raises(ConfigurationError, match=said):
        load(file)


@pytest.mark.parametrize("url", ["http://me:secret@a℀b.com", "http://me:secret/1@x"])
def test_an_unreadable_url_is_refused_without_showing_its_login(file: Path, url: str) -> None:
    file.write_text(WHOLE + f'[endpoints.x]\nurl = "{url}"')
    with pytest.raises(ConfigurationError, match=r"endpoints\.x\.url: it is not a URL") as refused:
        load(file)
    assert "secret" not in str(refused.value)


def test_a_password_from_the_environment_is_only_that(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever characters it has, it ends nowhere else in the dsn."""
    monkeypatch.setenv("SECRET", "x host=elsewhere ' @/?")
    for dsn in (
        "dbname=app password=${SECRET}",
        "postgresql://me:${SECRET}@db/app",
        "postgresql+psycopg://me:${SECRET}@db/app",
    ):
        file.write_text(WHOLE.replace("dbname=app", dsn))
        parts = load(file).brokers["app"].dsn.parts
        assert parts["password"] == "x host=elsewhere ' @/?"
        assert parts.get("host") in (None, "db")
    monkeypatch.delenv("SECRET")
    with pytest.raises(ConfigurationError, match=r"dsn needs the environment variable SECRET"):
        load(file)


def test_the_environment_wins_over_what_the_file_says(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(WHOLE + "[forwarder]\nchunk_rows = 5\nattempts = 2\n")
    monkeypatch.setenv("SAF_FORWARDER__CHUNK_ROWS", "7")
    settings = load(file).forwarder
    assert (settings.chunk_rows, settings.attempts) == (7, 2)
