"""Metrics: what programs of saf count while they work, and how Prometheus gets it.

`declared` names every metric, with its unit and labels; docs/metrics.md is generated from it. Code
that does something reports it to `process`, which forgets it unless somebody has switched it on;
so nothing else here is imported by whoever sends, forwards or receives. `prometheus` alone knows
prometheus-client. What the databases say of themselves is read by `saf.operating.figures`.
"""
