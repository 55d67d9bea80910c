"""The incarnation of a broker: which of its lives this is, after it was set back and repaired.

Every repair raises it, so that who remembers an older one compares what both know.
"""

from __future__ import annotations

from typing import Any

import psycopg

RAISE = "UPDATE saf.broker SET incarnation = incarnation + 1"


def raise_incarnation(connection: psycopg.Connection[Any]) -> None:
    """This broker was set back, and is repaired now."""
    connection.execute(RAISE)
