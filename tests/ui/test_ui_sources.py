"""The overview shows the sources of saf.toml beside the destinations."""

from __future__ import annotations

import re
from pathlib import Path

from saf.config import load
from saf.database import Dsn
from tests.dashboard import OPERATE, Dashboard, dashboard
from tests.pipeline import connect
from tests.receivers import prepare
from tests.redis_server import RedisServer
from tests.topics import add, read, redis_source, written
from tests.waits import until


def row(there: Dashboard) -> list[str]:
    """The texts of the row of the source."""
    page = there.client().get("/").text
    (section,) = re.findall(r'<section class="card" id="sources">(.*?)</section>', page, re.DOTALL)
    (cells,) = re.findall(r"<tbody>(.*?)</tbody>", section, re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", cells).split()).split()


def test_a_source_is_shown_with_its_topic_and_what_was_not_read_yet(
    app: Dsn, mom: Dsn, queue: RedisServer, tmp_path: Path
) -> None:
    prepare(mom)
    file = written(tmp_path / "saf.toml", mom, queue, app=app, chunk_rows=2)
    with file.open("a") as more:
        more.write(f'[ui]\noperate_token = "{OPERATE}"\n')
    with dashboard(load(file)) as there:
        assert row(there)[-4:-1] == ["not", "read", "yet"]
        add(queue, *map(str, range(5)))
        source = redis_source(queue, chunk_rows=2)
        read(source, mom)
        until(lambda: row(there)[-4:] == ["up", "to", "date", "0"])
        add(queue, "6", "7")
        with connect(mom) as connection:
            connection.execute("UPDATE saf.source_shard SET pending = 2")
        until(lambda: row(there) == ["payments", "payments", "redis", "mom", "behind", "2"])


def test_without_sources_there_is_nothing_about_them(there: Dashboard) -> None:
    assert 'id="sources"' not in there.client().get("/").text
