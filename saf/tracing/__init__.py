"""Traces: messages carry the context in which they were sent, and saf goes on with it.

It is OpenTelemetry's, by its API alone: who records spans, and where they go, is the application's
to set up. saf never imports OpenTelemetry in a process that has not; there, `on` is false, and
everything here does nothing. `carried` is about what messages carry, `spans` about what is recorded
while they are forwarded, received and dispatched, `log_lines` about the log.

Nothing here raises, whatever a message carries: what is malformed, too long or no text counts as
absent.
"""
