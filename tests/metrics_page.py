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

What saf shows to Prometheus. This page is for operators who build dashboards and alerts. After
it, you know where each metric comes from, its unit and its labels. `python -m tests.metrics_page`
writes it from the code. The extra `metrics` has what it needs: `pip install
'saf-outbox[metrics]'`.

## Where to scrape

| what | asks | says |
| --- | --- | --- |
| `saf metrics --listen :9464` | the databases of all brokers and destinations of saf.toml, at \
each scrape | what is pending, parked, dead, and how old; who works on it; how full the rings \
are |
| `saf forward --loop --metrics :9464` | nobody | what this forwarder has done since it started |
| `saf worker MODULE:WORKER --metrics :9464` | nobody | what this worker has done; with \
`--processes 4`, the others are at :9465, :9466 and :9467. `saf router serve` has the same |
| `saf dispatch --loop --metrics :9464` | nobody | what this dispatcher has done |

One `saf metrics` is enough for all. The role is an `operator` (`saf grant --role operator`); to
see the age of other users' transactions, it needs `pg_read_all_stats` as well.

Without a port to scrape, for instance under cron:

<!-- test: shell -->
```sh
saf metrics                                        # once, to standard output
saf metrics --textfile saf.prom                    # for the node exporter
saf forward --metrics-textfile saf-forward.prom    # what this run has done
saf purge --metrics-textfile saf-purge.prom        # what this purge has emptied
```

`--metrics-push http://gateway:9091` (`saf metrics --push`) pushes the same to a pushgateway, when
the run ends. A file is complete whenever it is there: it is renamed into its place.
`--metrics-textfile` of a program that stays is written every 15 s. Counters of a run begin at 0,
as those of any process: for runs under cron, the databases' metrics say more.

## What it costs

- **The databases** are asked about as much for 10 million pending messages as for 10,000. Up to
  1,000 messages of each shard are counted, and what is beyond is estimated; the ages are never
  estimated. Of what is parked or dead, {MOST:,} are counted. A statement may take 5 s. Two
  scrapes within {FRESH_SECONDS:g} s get the same answers. On 2 cores, a scrape of an idle broker
  took 2.4 ms of the server's processor time and 2.2 ms of the exporter's, and one with a million
  messages pending 58 and 4.3 ms.
- **While nothing is committed** in a broker's server, the broker is asked one question, whether
  that is so, for up to {KEPT_SECONDS:g} s; ages and leases are worked out anew each time, and a
  route that expires lets it be asked. That took the exporter 0.13 ms, and the server 0.35. So for
  100 brokers in which nothing happens, scraped every 15 s, it takes 0.4 % of a core, and 1.5 % if
  something is committed between any two scrapes.
- **A broker that does not answer** has `saf_up` 0 and nothing else. A page waits
  {PATIENCE_SECONDS:g} s for its brokers, and is complete but for those, also if a host with
  dozens of brokers drops packets. A fleet whose server does not answer has the brokers that it was
  last known to have.
- **Labels** are names that you have given: brokers, destinations, subscriptions, endpoints. There
  is never a key or an id. Of the services, the {SERVICES} of each broker with the most pending
  messages are named, and the others are `{OTHER}`. A process has at most {MOST_SERIES:,} series
  of a metric; what comes later is counted as `{OTHER}`.
- **A process** counts per chunk, delivery, request or call of a handler: nothing is counted per
  message on its way. Without `--metrics`, nothing is counted. With them, a drain of the forwarder
  was not slower (`metrics_drain_ratio` in [benchmarks.md](benchmarks.md)).

[operations.md](operations.md#alerts) has what to do about each alert of
[ops/prometheus/rules.yaml](../ops/prometheus/rules.yaml), and
[ops/grafana/saf.json](../ops/grafana/saf.json) is a dashboard.
"""

SECTIONS = {
    "database": (
        "What the databases say",
        "By `saf metrics`. Each has the label `broker`, the name that saf.toml gives it.",
    ),
    "forwarder": (
        "What a forwarder has done",
        "By `saf forward`. Tasks of Spark report by their receipts, wherever they run.",
    ),
    "worker": (
        "What a worker has done",
        "By `saf worker` and `saf router serve`, for workers and processors.",
    ),
    "dispatcher": ("What a dispatcher has done", "By `saf dispatch`."),
    "purge": (
        "What a purge has done",
        "By `saf purge`, and by a forwarder that is a purger too.",
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
