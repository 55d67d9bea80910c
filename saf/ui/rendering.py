"""Rendering: the templates, and their formats for figures and names."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from saf.errors import ranges
from saf.operating.wording import age, at, counted, shown
from saf.ui.redaction import error

HERE = Path(__file__).parent
TEMPLATES, STATIC = HERE / "templates", HERE / "static"
WIDTH, HEIGHT = 120, 28
LINES = 2
NONE = Markup("-")


def environment() -> Environment:
    """Return the templates; all values are escaped."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "age": age,
        "ago": ago,
        "moment": moment,
        "counted": counted,
        "number": number,
        "short": short,
        "name": name,
        "text": text,
        "error": error,
        "folded": folded,
        "sparkline": sparkline,
        "ranges": ranges,
    }
    return templates


SHORT, LONG = 90, 300
"""Letters that fit into two lines of a phone, and of a desk."""


def folded(value: object, place: object = "") -> Markup:
    """Return the text of an error, folded to two lines if it is longer; a click unfolds it.

    ``place`` names the row, so that a live page keeps what a visitor has unfolded.

    >>> print(folded("no"))
    no
    """
    shown_text = error(value)
    lines = shown_text.count("\n") + 1
    if lines <= LINES and len(shown_text) <= SHORT:
        return escape(shown_text)
    size = "long" if lines > LINES or len(shown_text) > LONG else "medium"
    name = hashlib.blake2b(f"{place} {shown_text}".encode(errors="replace"), digest_size=8)
    return Markup(
        '<details class="fold {}" id="why-{}" hx-preserve><summary><span class="lines">{}</span>'
        "</summary></details>"
    ).format(size, name.hexdigest(), shown_text)


def number(value: float | None) -> str:
    """Return a count, or an estimate as a whole number.

    >>> number(12345.6), str(number(None))
    ('12,346', '-')
    """
    return NONE if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Return a count for a tile.

    >>> short(950), short(12345), short(10_000_000)
    ('950', '12.3 k', '10.0 M')
    """
    if value is None:
        return NONE
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / min(size, 1e3) if unit == 'k' else value / size:.1f} {unit}"
    return f"{value:,.0f}"


def name(value: object) -> Markup:
    """Return a name that a user has chosen, without control characters or changes of direction.

    >>> str(name("a<b" + chr(0x202e)))
    '<bdi>a&lt;b\\\\u202e</bdi>'
    """
    return Markup("<bdi>{}</bdi>").format(shown("" if value is None else str(value)))


def text(value: object) -> str:
    """Return a longer text from outside, such as an error."""
    return shown("" if value is None else str(value), lines=True)


def moment(value: datetime | None) -> Markup:
    """Return a time for display; its element also has the exact value."""
    if value is None:
        return NONE
    return Markup('<time datetime="{}">{}</time>').format(value.isoformat(), at(value))


CLOCKS_SECONDS = 5.0
"""Difference between the clocks of two machines that is not shown."""


def ago(value: datetime | None) -> Markup:
    """Return the age of a time, by this machine's clock; its element has the exact time.

    A time that is further ahead than clocks differ is in the future.
    """
    if value is None:
        return NONE
    seconds = time.time() - value.timestamp()
    ahead = seconds < -CLOCKS_SECONDS
    words = f"in {age(-seconds)}" if ahead else f"{age(max(0.0, seconds))} ago"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        value.isoformat(), at(value), words
    )


def sparkline(values: Sequence[float], label: str) -> Markup:
    """Return a curve of the last values."""
    if len(values) < 2:  # noqa: PLR2004 - a line has two ends
        return Markup('<svg class="spark" viewBox="0 0 {} {}" aria-hidden="true"></svg>').format(
            WIDTH, HEIGHT
        )
    top = max(*values, 1.0)
    step = WIDTH / (len(values) - 1)
    points = [(n * step, HEIGHT - 2 - v / top * (HEIGHT - 5)) for n, v in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    description = f"{label}: from {values[0]:,.0f} to {values[-1]:,.0f}, at most {max(values):,.0f}"
    return Markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" '
        'aria-label="{said}"><polygon points="0,{h} {line} {w},{h}"/><polyline points="{line}"/>'
        "</svg>"
    ).format(w=WIDTH, h=HEIGHT, said=escape(description), line=line)
