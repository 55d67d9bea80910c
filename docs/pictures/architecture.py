"""architecture.svg: where a message goes, with the seven steps and their three commits.

    python docs/pictures/architecture.py     # writes it

It has a background of its own and colours for light and dark, so that it can be read on any page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FILE = Path(__file__).with_suffix(".svg")

WIDTH, HEIGHT = 1000, 372

PROMISE = "in order per key · exactly once · any number of sources and destinations"
AFTER_A_CRASH = (
    "A crash after any step loses nothing. After 5, before 7, the message is sent again, "
    "and the watermark drops it."
)
ASIDE = "Undeliverable messages wait in order, or become dead letters; all others continue."

LIGHT = {
    "page": "#ffffff",
    "box": "#eef2f6",
    "table": "#ffffff",
    "line": "#51606e",
    "text": "#1b2733",
    "quiet": "#4a5866",
    "mark": "#9a3412",
}
DARK = {
    "page": "#14191f",
    "box": "#202830",
    "table": "#14191f",
    "line": "#9fb0c0",
    "text": "#e8eef4",
    "quiet": "#b3c0cc",
    "mark": "#fdba74",
}

STYLE = """
  .page {{ fill: {page} }} .box {{ fill: {box}; stroke: {line} }}
  .table {{ fill: {table}; stroke: {line} }}
  .one {{ fill: none; stroke: {mark}; stroke-dasharray: 5 4 }}
  .way {{ stroke: {line}; stroke-width: 2; fill: none }} .head {{ fill: {line} }}
  .text {{ fill: {text} }} .quiet {{ fill: {quiet} }} .mark {{ fill: {mark} }}"""


def style() -> str:
    """The colours: light ones, and dark ones for who prefers them."""
    return (
        "text { font-family: system-ui, sans-serif; font-size: 15px }\n"
        "  .title { font-weight: 600 } .small { font-size: 13px } .code { font-family: monospace }"
        + STYLE.format(**LIGHT)
        + "\n  @media (prefers-color-scheme: dark) {"
        + STYLE.format(**DARK).replace("\n", "\n  ")
        + "\n  }"
    )


def words(x: int, y: int, said: str, kind: str = "text") -> str:
    """A line of text, with its middle at x."""
    return f'<text x="{x}" y="{y}" text-anchor="middle" class="{kind}">{escape(said)}</text>'


def box(x: int, y: int, width: int, height: int, kind: str = "box") -> str:
    """A rounded box."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" class="{kind}"/>'


def table(x: int, y: int, said: str, width: int = 150) -> str:
    """A table of a database."""
    return box(x, y, width, 34, "table") + words(x + width // 2, y + 22, said, "text code")


def way(x: int, y: int, to: int) -> str:
    """An arrow to the right."""
    return (
        f'<path d="M{x} {y} H{to - 9}" class="way"/>'
        f'<path d="M{to} {y} l-10 -6 v12 z" class="head"/>'
    )


def picture() -> str:
    """The picture."""
    drawn = [
        box(0, 0, WIDTH, HEIGHT, "page"),
        # the application
        box(20, 50, 210, 190),
        words(125, 78, "application database", "text title"),
        box(40, 96, 170, 100, "one"),
        table(50, 106, "orders"),
        table(50, 152, "saf.outbox"),
        words(125, 222, "1, 2, commit 3", "mark small"),
        way(230, 146, 300),
        # the forwarder
        box(300, 50, 270, 190),
        words(435, 78, "forwarder", "text title"),
        words(435, 118, "read → route → deliver → mark", "text"),
        words(435, 146, "tasks of Spark, or one process", "quiet"),
        words(435, 168, "Arrow from COPY to COPY", "quiet"),
        words(435, 222, "cron · systemd · Airflow · --loop", "quiet small"),
        way(570, 146, 640),
        # the store
        box(640, 50, 340, 190),
        words(810, 78, "store: where services read", "text title"),
        box(656, 96, 150, 100, "one"),
        table(666, 106, "saf.inbox", 130),
        table(666, 152, "saf.watermark", 130),
        words(731, 222, "4, commit 5", "mark small"),
        box(820, 96, 150, 100, "one"),
        table(830, 106, "invoice", 130),
        table(830, 152, "saf.cursor", 130),
        words(895, 222, "a worker's transaction", "mark small"),
        # back to the source
        '<path d="M435 240 V276 H125 V250" class="way"/>'
        '<path d="M125 240 l-6 10 h12 z" class="head"/>',
        words(280, 268, "6, commit 7: marked, one row a shard", "mark small"),
        words(500, 318, AFTER_A_CRASH, "text"),
        words(500, 344, ASIDE, "quiet"),
        words(500, 30, PROMISE, "quiet"),
    ]
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="A message on its way from an application to a consumer">\n'
        f"<style>\n  {style()}\n</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(picture())
