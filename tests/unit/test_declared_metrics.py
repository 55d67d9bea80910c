"""Metrics: declared once, kept by nobody by default, bounded, and shown as Prometheus wants it."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import saf
from saf.errors import ConfigurationError, UsageError
from saf.telemetry import metrics, prometheus
from saf.telemetry.metrics import (
    CHUNK_MESSAGES,
    CYCLES,
    FORWARDED,
    METRICS,
    MOST_SERIES,
    OTHER,
    Tally,
    count,
    observe,
    timed,
)
from tests.scraping import families, series, value

HERE = Path(saf.__file__).parent
UNITS = (
    "_seconds",
    "_messages",
    "_slots",
    "_shards",
    "_attempts",
    "_letters",
    "_lanes",
    "_members",
    "_total",
)
COUNTED = {
    *("saf_up", "saf_endpoint_state", "saf_destination_state"),
    "saf_subscription_paused",
}
"""Names without a unit: of what is counted in itself, or is a state."""


@pytest.fixture
def store() -> metrics.Store:
    metrics.switch_off()
    return metrics.switch_on()


@pytest.fixture(autouse=True)
def _off() -> object:
    yield
    metrics.switch_off()


def test_every_metric_has_a_name_with_its_unit_and_labels_that_no_sender_chooses() -> None:
    names = [one.name for one in METRICS]
    assert len(set(names)) == len(names)
    for one in METRICS:
        assert re.fullmatch(r"saf_[a-z_]+", one.name)
        assert one.name in COUNTED or one.name.endswith((*UNITS, "_in_flight")), one.name
        assert (one.kind == "counter") == one.name.endswith("_total")
        assert bool(one.bounds) == (one.kind == "histogram")
        assert one.help.endswith(".")
        assert not {"key", "message_id", "shard", "type"} & {*one.labels}


def test_every_metric_that_is_declared_is_reported_by_somebody() -> None:
    own = Path(metrics.__file__)
    source = {path: path.read_text() for path in HERE.rglob("*.py") if path != own}
    by_name = {name: one for name, one in vars(metrics).items() if isinstance(one, metrics.Metric)}
    for name in by_name:
        assert any(re.search(rf"\b{name}\b", text) for text in source.values()), name


def test_nobody_keeps_what_is_reported_until_somebody_wants_it() -> None:
    count(FORWARDED, 7, broker="shop", destination="mom")
    with timed(CYCLES):
        pass
    assert not metrics.counting()
    store = metrics.switch_on()
    assert store.samples() == []
    assert metrics.switch_on() is store
    count(FORWARDED, 7, broker="shop", destination="mom")
    assert [one.value for one in store.samples()] == [7]


def test_only_one_module_knows_the_library_and_none_loads_it_before_somebody_wants_metrics() -> (
    None
):
    knows = [
        path.relative_to(HERE).as_posix()
        for path in HERE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and "prometheus_client" in ast.unparse(node)
    ]
    assert set(knows) == {"telemetry/prometheus.py"}
    ask = (
        "import sys, saf, saf.cli, saf.forwarding.forwarder, saf.engine.task, "
        "saf.receiving.dispatch.dispatcher; print('prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_process_has_a_bounded_number_of_series(store: metrics.Store) -> None:
    for number in range(MOST_SERIES + 500):
        count(FORWARDED, broker=f"tenants/{number}", destination="mom")
    values = {one.labels: one.value for one in store.samples()}
    assert len(values) == MOST_SERIES + 1
    assert values[OTHER, OTHER] == 500
    count(FORWARDED, broker="tenants/0", destination="mom")
    assert {one.labels: one.value for one in store.samples()}["tenants/0", "mom"] == 2


def test_threads_may_count_at_the_same_time(store: metrics.Store) -> None:
    def add() -> None:
        for _ in range(2000):
            count(FORWARDED, broker="shop", destination="mom")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one.value for one in store.samples()] == [8000]


def test_a_tally_travels_and_takes_as_much_room_for_many_values_as_for_few() -> None:
    tally = CHUNK_MESSAGES.tally()
    for number in range(1000):
        tally.add(number)
    again = pickle.loads(pickle.dumps(tally))  # noqa: S301 - our own bytes
    assert (again.total, again.sum) == (1000, tally.sum)
    assert len(pickle.dumps(tally)) < 500
    assert Tally((1,)).total == 0


def test_a_page_has_help_labels_and_cumulative_steps(store: metrics.Store) -> None:
    count(FORWARDED, 3, broker='a "b"\n', destination="mom")
    observe(CYCLES, 0.003)
    observe(CYCLES, 1e9)
    page = prometheus.page(store.samples)
    assert "# HELP saf_forwarded_messages_total Messages that were stored" in page
    assert value(page, "saf_forwarded_messages_total", broker='a "b"\n', destination="mom") == 3
    assert value(page, "saf_cycle_seconds_bucket", le="0.0025") == 0
    assert value(page, "saf_cycle_seconds_bucket", le="0.005") == 1
    assert value(page, "saf_cycle_seconds_bucket", le="+Inf") == 2
    assert value(page, "saf_cycle_seconds_count") == 2
    assert families(page) == {"saf_forwarded_messages_total", "saf_cycle_seconds"}
    assert len(series(page)) > 5


def test_a_file_is_there_as_a_whole_or_not_at_all(store: metrics.Store, tmp_path: Path) -> None:
    file = tmp_path / "saf.prom"
    count(FORWARDED, 3, broker="shop", destination="mom")
    prometheus.write(store.samples, file)
    assert value(file.read_text(), "saf_forwarded_messages_total", broker="shop", destination="mom")

    def fails() -> list[metrics.Sample]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prometheus.write(fails, file)
    assert "saf_forwarded" in file.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["saf.prom"]
    with pytest.raises(ConfigurationError, match="name a file in an existing folder"):
        prometheus.write(store.samples, tmp_path / "gone" / "saf.prom")


@pytest.mark.parametrize("listen", ["9464", ":x", ":70000", "host", "[::1]"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT or :PORT"):
        prometheus.address(listen)
