"""Samples: what processes, databases and messages look like at one moment of a soak.

Memory is what a program and all below it have for themselves (USS). What programs share is not
theirs: libraries, whose part of each changes with whoever else runs, and PostgreSQL's buffers,
which are as large as its settings say.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

import psutil

from tests.soak.flatness import Sample
from tests.soak.programs import family
from tests.soak.site import Site

MIB = 2**20
PARTITION = re.compile(r"_\d+$")
TABLES = """
SELECT relname, pg_table_size(relid), pg_indexes_size(relid), n_dead_tup
FROM pg_stat_user_tables WHERE schemaname = 'saf'
"""
CONNECTIONS = """
SELECT coalesce(nullif(application_name, ''), backend_type), count(*) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() GROUP BY 1
"""
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8"
WAITED = "DELETE FROM soak.waited RETURNING service, seconds"
SENT = "SELECT coalesce(sum(n), 0)::bigint FROM soak.sent"
BY_NAME = {
    *("outbox", "inbox", "cursor", "member", "watermark", "acknowledged", "parked", "backoff"),
    *("dead_letter", "conversation", "fragment", "dispatched", "attempt", "route_version"),
}
"""Tables that have a figure of their own; all others have one together."""


class Sampler:
    """Takes the samples of a piece."""

    def __init__(self, site: Site, piece: int, pids: Mapping[str, int]) -> None:
        self._site, self._piece, self._pids = site, piece, pids
        self._before: tuple[float, float] | None = None

    def take(self, seconds: float) -> Sample:
        """Take one; ``seconds``: since the piece began."""
        figures = dict(self._of_processes())
        figures |= self._of_databases()
        with closing(self._site.redis.client()) as client:
            figures["redis/memory"] = client.info("memory")["used_memory"] / MIB
        rounded = {name: round(value, 3) for name, value in sorted(figures.items())}
        return Sample(piece=self._piece, seconds=round(seconds, 1), figures=rounded)

    def _of_processes(self) -> Iterator[tuple[str, float]]:
        server = int((self._site.server.data_dir / "postmaster.pid").read_text().split()[0])
        assert self._site.redis.process is not None
        roots = {**self._pids, "postgresql": server, "redis": self._site.redis.process.pid}
        for name, pid in roots.items():
            memory = handles = threads = 0
            for one in family(pid):
                with suppress(psutil.Error):
                    full = one.memory_full_info()
                    memory += full.uss
                    handles += one.num_fds()
                    threads += one.num_threads()
            yield f"memory/{name}", memory / MIB
            yield f"handles/{name}", handles
            if name != "postgresql":  # its processes are counted as connections
                yield f"threads/{name}", threads

    def _of_databases(self) -> dict[str, float]:
        figures: dict[str, float] = defaultdict(float)
        for place, dsn in self._site.brokers().items():
            with dsn.connect(role="soak", autocommit=True) as connection:
                for table, size, index, dead in connection.execute(TABLES):
                    log = PARTITION.sub("", table)
                    name = f"{place}.{log if log in BY_NAME else 'others'}"
                    figures[f"table/{name}"] += size / MIB
                    figures[f"index/{name}"] += index / MIB
                    figures[f"dead/{place}"] += dead
                if place == "app":
                    self._of_app(connection, figures)
                waits = connection.execute(WAITED).fetchall()
                for service in {service for service, _ in waits}:
                    own = sorted(seconds for one, seconds in waits if one == service)
                    figures[f"p50/{service}"] = 1000 * own[len(own) // 2]
                    figures[f"p99/{service}"] = 1000 * own[int(len(own) * 0.99)]
        return figures

    def _of_app(self, connection: Any, figures: dict[str, float]) -> None:
        """What is of the server, and is asked once; and how much was sent."""
        for name, count in connection.execute(CONNECTIONS):
            figures[f"connections/{name}"] = count
        wal, sent = (float(connection.execute(one).fetchone()[0]) for one in (WAL, SENT))
        figures["sent"] = sent
        if self._before is not None and sent > self._before[1]:
            figures["wal/all"] = (wal - self._before[0]) / (sent - self._before[1])
        self._before = wal, sent
