"""Assets for messages that arrive at a destination."""

from __future__ import annotations

from urllib.parse import quote

from airflow.sdk import Asset


def destination(name: str, service: str | None = None) -> Asset:
    """The asset ``saf://NAME``: it has an event for each run that has brought messages there.

    With a service, ``saf://NAME/SERVICE``: for each run that has brought messages for it. What a
    URI cannot have is quoted.
    """
    words = [name] if service is None else [name, service]
    uri = "saf://" + "/".join(quote(word, safe="") for word in words)
    return Asset(name=uri, uri=uri)
