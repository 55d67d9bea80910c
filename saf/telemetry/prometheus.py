"""Prometheus: samples as a page, a file or a push. The only module that knows prometheus-client.

Samples are taken again for each page. A separate thread serves pages. A file is written beside its
target and renamed, so no reader sees a partial file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from saf.errors import ConfigurationError, MissingExtra, Unavailable, UsageError
from saf.telemetry.metrics import Metric, Sample, Tally

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import CollectorRegistry

Take = Callable[[], Iterable[Sample]]
"""Returns the samples to show now."""

PUSH_SECONDS = 10.0
EVERYWHERE = "0.0.0.0"  # noqa: S104 - the meaning of :PORT  # nosec B104


class _Collector:
    """Collector that prometheus-client asks for families of samples."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def describe(self) -> list[Family]:
        """Return nothing: registering a collector need not query the databases."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield a family for each metric that has a value."""
        by_metric: dict[Metric, list[Sample]] = {}
        for sample in self._take():
            by_metric.setdefault(sample.metric, []).append(sample)
        for metric, samples in by_metric.items():
            yield _family(metric, samples)


def registry(take: Take) -> CollectorRegistry:
    """Return a registry of these samples.

    Raises:
        MissingExtra: prometheus-client is not installed.
    """
    try:
        from prometheus_client.registry import CollectorRegistry
    except ImportError:
        raise MissingExtra("metrics", "showing metrics to Prometheus") from None
    found = CollectorRegistry(auto_describe=False)
    found.register(_Collector(take))
    return found


def page(take: Take) -> str:
    """Return the samples in the text format of Prometheus."""
    collectors = registry(take)
    from prometheus_client import generate_latest

    return generate_latest(collectors).decode()


def serve(take: Take, listen: str) -> Callable[[], None]:
    """Serve the samples over HTTP; return a function that stops the server.

    ``listen`` is ``:9464``, or ``127.0.0.1:9464``, or ``[::1]:9464``.

    Raises:
        UsageError: the address is invalid or in use.
    """
    host, port = address(listen)
    collectors = registry(take)
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr=host, registry=collectors)
    except OSError as error:
        raise UsageError(
            f"metrics cannot be served at {listen}: {error.strerror or error}; name another port"
        ) from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close


def address(listen: str) -> tuple[str, int]:
    """Return host and port.

    >>> address(":9464"), address("127.0.0.1:0"), address("[::1]:9464")
    (('0.0.0.0', 9464), ('127.0.0.1', 0), ('::1', 9464))
    """
    host, colon, port = listen.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and int(port) <= 65535):  # noqa: PLR2004
        raise UsageError(f"metrics at {listen!r}: expected HOST:PORT or :PORT, such as :9464")
    return host.strip("[]") or EVERYWHERE, int(port)


def write(take: Take, file: Path) -> None:
    """Write the samples to a file, atomically, as the node exporter reads them from a folder.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    collectors = registry(take)
    from prometheus_client import write_to_textfile

    try:
        write_to_textfile(str(file), collectors)
    except OSError as error:
        raise ConfigurationError(
            f"metrics cannot be written to {file}: {error.strerror or error}; name a file in an "
            "existing folder that is writable"
        ) from None


def check_gateway(gateway: str) -> None:
    """Check that an address can be a pushgateway's.

    >>> check_gateway("localhost:9091"), check_gateway("https://push.example.com/prefix")
    (None, None)

    Raises:
        UsageError: the address is invalid.
    """
    try:
        parts = urlsplit(gateway if "://" in gateway else f"http://{gateway}")
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # as before a name lookup
    except ValueError:
        is_url = False
    if not is_url or not gateway.isascii() or not gateway.isprintable() or " " in gateway:
        raise UsageError(
            f"metrics to {gateway!r}: expected HOST:PORT or a URL, such as "
            "http://pushgateway.example.com:9091"
        )


def push(take: Take, gateway: str, job: str) -> None:
    """Push the samples to a pushgateway, replacing those that the job has pushed before.

    Raises:
        UsageError: the address is invalid.
        Unavailable: the pushgateway does not answer.
    """
    check_gateway(gateway)
    collectors = registry(take)
    from prometheus_client import push_to_gateway

    try:
        push_to_gateway(gateway, job=job, registry=collectors, timeout=PUSH_SECONDS)
    except (OSError, HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise Unavailable(f"pushgateway {gateway}", reason) from None


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    from prometheus_client import core

    kinds: dict[str, Any] = {
        "gauge": core.GaugeMetricFamily,
        "counter": core.CounterMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    family: Any = kinds[metric.kind](
        metric.name.removesuffix("_total"), metric.help, labels=metric.labels
    )
    for sample in samples:
        if isinstance(sample.value, Tally):
            counts = accumulate(sample.value.counts)
            names = [*map(_bound, sample.value.bounds), "+Inf"]
            buckets = [list(bucket) for bucket in zip(names, counts, strict=True)]
            family.add_metric(sample.labels, buckets=buckets, sum_value=sample.value.sum)
        else:
            family.add_metric(sample.labels, sample.value)
    return family  # type: ignore[no-any-return]


def _bound(bound: float) -> str:
    return str(float(bound))
