"""Metrics: what saf's programs count, and how Prometheus gets the numbers.

`declared` names every metric, with its unit and labels; docs/metrics.md is generated from it. Code
reports events to `process`, which ignores them unless it is switched on; so code that sends,
forwards or receives imports nothing else from here. Only `prometheus` depends on prometheus-client.
`saf.operating.figures` reads the numbers of the databases.
"""
