"""Assets for messages that arrive at a destination."""

from __future__ import annotations

from urllib.parse import quote

from airflow.sdk import Asset


def destination(name: str, service: str | None = None) -> Asset:
    """Return the asset ``saf://NAME``, with an event for each run that has brought messages there.

    With a service, return ``saf://NAME/SERVICE``, with an event for each run that has brought
    messages for that service. Characters that a URI does not allow are quoted.
    """
    words = [name] if service is None else [name, service]
    uri = "saf://" + "/".join(quote(word, safe="") for word in words)
    return Asset(name=uri, uri=uri)
