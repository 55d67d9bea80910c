"""Processes that record spans: each appends them, as lines of JSON, to one file.

The folder that `site` makes goes into PYTHONPATH. So OpenTelemetry's SDK is set up before a program
begins, as `opentelemetry-instrument` sets it up, and hands spans over in the background and at the
exit, as it does in production.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SITE = """
import os
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult


class Appending(SpanExporter):
    def export(self, spans):
        lines = "".join(one.to_json(indent=None) + "\\n" for one in spans)
        with Path({file!r}).open("a") as file:
            file.write(lines)
        return SpanExportResult.SUCCESS


provider = TracerProvider()
# only the exit hands them over
provider.add_span_processor(BatchSpanProcessor(Appending(), schedule_delay_millis=3_600_000))
trace.set_tracer_provider(provider)
"""


def site(folder: Path) -> tuple[dict[str, str], Path]:
    """What a process that records spans has in its environment; and the file for them."""
    file = folder / "spans.jsonl"
    file.touch()
    (folder / "sitecustomize.py").write_text(SITE.format(file=str(file)))
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}, file


def spans(file: Path) -> list[dict[str, Any]]:
    """What was recorded."""
    return [json.loads(line) for line in file.read_text().splitlines()]
