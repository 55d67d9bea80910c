"""docs/metrics.md: every metric, from what `saf.telemetry.metrics` says of it.

python -m tests.metrics_page      # writes the page
"""

from __future__ import annotations

from pathlib import Path

from saf.operating.figures import KEPT_SECONDS, MOST, SERVICES
from saf.operating.watch import FRESH_SECONDS, PATIENCE_SECONDS
from saf.telemetry.metrics import METRICS, MOST_SERIES, OTHER, Metric

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = f"""# Metrics

This page is for operators who build dashboards and alerts with Prometheus. It lists every metric
of saf, with its source, unit and labels. Install the extra `metrics` first: `pip install
'.[metrics]'` in a clone of saf.

## Where to scrape

| command | reads | reports |
| --- | --- | --- |
| `saf metrics --listen :9464` | the databases of all brokers and destinations of saf.toml, at \
each scrape | pending, parked and dead messages, and their age; live members; how full the logs \
are |
| `saf forward --loop --metrics :9464` | nothing | the work of this forwarder since it started |
| `saf worker MODULE:WORKER --metrics :9464` | nothing | the work of this worker; with \
`--processes 4`, the other processes use :9465, :9466 and :9467. `saf router serve` has the same \
option |
| `saf dispatch --loop --metrics :9464` | nothing | the work of this dispatcher |

One `saf metrics` covers all databases. Its role is an `operator` (`saf grant --role operator`); to
see the age of other users' transactions, the role also needs `pg_read_all_stats`.

Without a port to scrape, for instance under cron:

<!-- test: shell -->
```sh
saf metrics                                        # once, to standard output
saf metrics --textfile saf.prom                    # for the node exporter
saf forward --metrics-textfile saf-forward.prom    # the work of this run
saf purge --metrics-textfile saf-purge.prom        # the messages and slots that this purge removed
```

`--metrics-push http://gateway:9091` (`saf metrics --push`) pushes the same figures to a
pushgateway, when the run ends. A file is written under another name and then renamed, so readers
only see complete files. A program that keeps running writes its `--metrics-textfile` every 15 s.
Counters begin at 0 with each process. So if runs are started by cron, use the databases' metrics.

## What it costs

- **Databases.** A scrape costs about the same with 10 million pending messages as with 10,000: up
  to 1,000 messages of each shard are counted, and larger numbers are estimated. Of parked messages
  and dead letters, up to {MOST:,} are counted. Ages are never estimated. A statement may take 5 s.
  Scrapes within {FRESH_SECONDS:g} s get the same answers. On 2 cores, a scrape of an idle broker
  took 2.4 ms of the server's processor time and 2.2 ms of the exporter's; with a million pending
  messages, 58 ms and 4.3 ms.
- **Idle databases.** While nothing is committed at a broker's server, a scrape only checks this,
  for up to {KEPT_SECONDS:g} s or until a route expires, and calculates ages and leases from the
  previous answer. The check took 0.13 ms of the exporter and 0.35 ms of the server. So 100 idle
  brokers, scraped every 15 s, take 0.4 % of a core; if something is committed between any two
  scrapes, 1.5 %.
- **A broker that does not answer** has `saf_up` 0 and no other metric. A scrape waits
  {PATIENCE_SECONDS:g} s for the brokers, even if a host with dozens of brokers drops packets, and
  then returns the metrics of all others. If the server of a fleet does not answer, the fleet keeps
  the brokers of the last answer.
- **Labels** contain the names of brokers, destinations, subscriptions, endpoints and services, but
  never keys or ids. For each broker, the {SERVICES} services with the most pending messages are
  named; the others are counted as `{OTHER}`. A process has at most {MOST_SERIES:,} series of a
  metric, and counts the rest as `{OTHER}`.
- **Processes** count by chunk, delivery, request or call of a handler, not by message. Without
  `--metrics`, they count nothing. With `--metrics`, a forwarder that drained a backlog was not
  slower (`metrics_drain_ratio` in [benchmarks.md](benchmarks.md)).

[operations.md](operations.md#alerts) describes how to respond to each alert of
[ops/prometheus/rules.yaml](../ops/prometheus/rules.yaml), and
[ops/grafana/saf.json](../ops/grafana/saf.json) is a dashboard. A maintainer writes this page from
the code by `python -m tests.metrics_page`.
"""

SECTIONS = {
    "database": (
        "Metrics of databases",
        "Reported by `saf metrics`. The label `broker` is the broker's name in saf.toml.",
    ),
    "forwarder": (
        "Metrics of forwarders",
        "Reported by `saf forward`, including the work of its Spark tasks on all machines.",
    ),
    "worker": (
        "Metrics of workers",
        "Reported by `saf worker` and `saf router serve`, for workers and processors.",
    ),
    "dispatcher": ("Metrics of dispatchers", "Reported by `saf dispatch`."),
    "purge": (
        "Metrics of purges",
        "Reported by `saf purge`, and by a forwarder that also purges.",
    ),
}


def page() -> str:
    """The page."""
    written = [HEAD]
    for origin, (title, text) in SECTIONS.items():
        written.append(f"## {title}\n\n{text}\n")
        rows = ["| metric | kind | unit | labels | |", "| --- | --- | --- | --- | --- |"]
        rows += [_row(one) for one in METRICS if one.origin == origin]
        written.append("\n".join(rows) + "\n")
    return "\n".join(written)


def _row(one: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    said = one.help
    if one.bounds:
        said += f" Steps: {', '.join(f'{bound:g}' for bound in one.bounds)}."
    return f"| `{one.name}` | {one.kind} | {one.unit} | {labels} | {said} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
