"""The demo's classifier: finds the airport whose store a flight is for."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def by_origin(messages: pa.RecordBatch) -> pa.Array:
    """Return the service of each message: the airport that the flight in its body left from."""
    bodies = messages["body"].cast(pa.string())
    return pc.extract_regex(bodies, '"origin":"(?P<origin>[A-Z]{3})"').field("origin")
