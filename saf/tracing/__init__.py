"""Traces: messages carry the context in which they were sent, and saf continues their traces.

Traces use OpenTelemetry, through its API alone: the application configures who records spans, and
where they go. saf never imports OpenTelemetry in a process that has not; there, `on` is false, and
everything here does nothing. `carried` handles the headers of messages; `spans` records forwarding,
receiving and dispatching; `log_lines` adds trace ids to the log.

Nothing here raises, whatever a message carries: malformed, overlong or non-text values count as
missing.
"""
