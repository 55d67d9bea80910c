"""Telemetry: metrics, traces and the log of saf's programs.

*Metrics.* `declared` names every metric, with its unit and labels; docs/metrics.md is generated
from it. Code reports events to `process`, which ignores them unless it is switched on; so code that
sends, forwards or receives imports nothing else from here. Only `prometheus` depends on
prometheus-client. `saf.operating.figures` reads the numbers of the databases.

*Traces.* Messages carry the context in which they were sent, and saf continues their traces, with
OpenTelemetry's API alone: the application configures who records spans, and where they go. saf
never imports OpenTelemetry in a process that has not; there, `spans.on` is false, and nothing here
has an effect. `carried` handles the headers of messages; `spans` records forwarding, receiving and
dispatching; `log_lines` adds trace ids to the log. Nothing here raises, whatever a message carries:
malformed, overlong or non-text values count as missing.
"""
