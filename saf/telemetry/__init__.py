"""Telemetry: metrics, traces and the log of saf's programs.

*Metrics.* `metrics` names every metric, with its unit and labels; docs/metrics.md is generated from
it. Code reports events to it, and they are ignored unless counting is switched on. Only
`prometheus` depends on prometheus-client. `saf.operating.figures` reads the numbers of the
databases.

*Traces.* Messages carry the context in which they were sent, and saf continues their traces, with
OpenTelemetry's API alone: the application configures who records spans, and where they go. saf
never imports OpenTelemetry in a process that has not; there, `carried.on` is false, and nothing has
an effect. `carried` handles the headers of messages; `tracing` records forwarding, receiving
and dispatching, and adds trace ids to the log. Nothing here raises, whatever a message carries:
malformed, overlong or non-text values count as missing.
"""
