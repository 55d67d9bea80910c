"""Scraping: pages of metrics, as Prometheus reads them."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> str:
    """The page that is served on a port of this machine; empty if there is none yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text: str = answer.read().decode()
    # where nobody listens yet, the kernel may connect a client with itself, and it reads its own
    # request
    except (urllib.error.URLError, ConnectionError, http.client.BadStatusLine):
        return ""
    return text


def served(port: int) -> bool:
    """Whether a page is served on a port, be there anything on it or not."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def series(page: str) -> Series:
    """All values of a page; no two have the same name and labels."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            named = (sample.name, frozenset(sample.labels.items()))
            assert named not in found, f"twice: {named}"
            found[named] = sample.value
    return found


def value(page: str, name: str, **labels: str) -> float | None:
    """One value; None if there is none with just these labels."""
    return series(page).get((name, frozenset(labels.items())))


def families(page: str) -> set[str]:
    """The names of the metrics that a page has values of, as they are declared."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(page)
        if family.samples
    }
