"""Assets: what has arrived at a destination."""

from __future__ import annotations

from airflow.sdk import Asset


def destination(name: str) -> Asset:
    """The asset ``saf://NAME``: it has an event for each run that has stored messages there."""
    return Asset(name=f"saf://{name}", uri=f"saf://{name}")
