"""Tracing: what messages carry, what is recorded, and what neither may do."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

CARRIED, SPANS, MESSAGE = "saf/telemetry/carried.py", "saf/telemetry/tracing.py", "saf/message.py"
TRACING, ONE_TRACE = "contract/test_tracing.py", "integration/test_one_trace.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a message carries no context",
        MESSAGE,
        "with_context(headers, message.headers) if traced else headers,",
        "headers,",
        f"{TRACING}::test_a_message_carries_the_context_in_which_it_is_sent",
    ),
    mutant(
        "a trace that the application has chosen gets the state of another",
        CARRIED,
        "known |= fields() - {BAGGAGE}",
        "pass",
        f"{TRACING}::test_headers_that_the_application_gives_win",
    ),
    mutant(
        "headers of any size get a context",
        CARRIED,
        "or len(headers) > LARGE:",
        "or len(headers) < 0:",
        f"{TRACING}::test_no_context_makes_a_message_too_large_or_no_text",
    ),
    mutant(
        "a header that is no text is heeded",
        CARRIED,
        "isinstance(value, str) and len(value) <= LONGEST",
        "len(str(value)) <= LONGEST",
        f"{TRACING}::test_a_header_that_is_no_plain_text_is_not_given_to_opentelemetry",
    ),
    mutant(
        "a header of any length is heeded",
        CARRIED,
        "and len(value) <= LONGEST",
        "and len(value) >= 0",
        f"{TRACING}::test_a_header_that_is_no_plain_text_is_not_given_to_opentelemetry",
    ),
    mutant(
        "headers are read for spans that nobody records",
        SPANS,
        "        if span.is_recording():\n            _link(span, _sampled(rows))",
        "        _link(span, _sampled(rows))",
        f"{TRACING}::test_without_a_span_that_is_recorded_no_header_is_read",
    ),
    mutant(
        "a chunk links to as many messages as carry a context",
        SPANS,
        "sample.filter(found).slice(0, MOST_LINKS)",
        "sample.filter(found)",
        f"{TRACING}::test_links_are_bounded",
    ),
    mutant(
        "a chunk is not stored where no header carries a trace",
        SPANS,
        "    if not names:\n        return\n",
        "",
        f"{TRACING}::test_whatever_the_propagators_are_messages_are_sent_forwarded_and_handled",
    ),
    mutant(
        "what a propagator raises is a message's fault",
        CARRIED,
        "    except Exception as error:\n",
        "    except ImportError as error:\n",
        f"{TRACING}::test_whatever_the_propagators_are_messages_are_sent_forwarded_and_handled",
    ),
    mutant(
        "a handler has no baggage",
        SPANS,
        "token = None if parent is None else context.attach(parent)",
        "token = None",
        f"{TRACING}::test_a_handler_works_in_the_trace_of_its_message_with_its_baggage",
    ),
    mutant(
        "a span says the text of an exception",
        SPANS,
        "record_exception=False,",
        "record_exception=True,",
        f"{TRACING}::test_a_failure_is_in_the_span_by_its_type_and_in_the_log_with_the_trace",
    ),
    mutant(
        "an endpoint gets the sender's span instead of the dispatcher's",
        SPANS,
        "return {**kept, **carrier}",
        "return {**carrier, **kept, **headers}",
        f"{TRACING}::test_a_request_goes_on_with_the_trace_of_its_message",
    ),
    mutant(
        "the commands end before the last spans are handed over",
        "saf/cli/__init__.py",
        "if not ended or carried.on():",
        "if not ended:",
        f"{ONE_TRACE}::test_a_request_and_the_handler_in_another_service_are_one_trace",
    ),
]
