"""The documentation as a site: it builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.pictures import architecture
from tests.programs import ROOT, environment

pytestmark = pytest.mark.full

LOADS = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=environment(NO_MKDOCS_2_WARNING="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class _Page(HTMLParser):
    """What a page loads, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "id" in given:
            self.ids.add(given["id"] or "")
        if tag in LOADS and (where := given.get(LOADS[tag])):
            # what is only said about a page is not loaded
            (
                self.links if given.get("rel") in ("canonical", "next", "prev") else self.loads
            ).append(where)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _Page]:
    return {file: _Page(file.read_text()) for file in site.rglob("*.html")}


@pytest.mark.slow
def test_every_page_is_on_the_site_and_in_its_contents(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    assert "Index Scan" in (site / "sql.html").read_text(), "the statements' plans"
    contents = (site / "index.html").read_text()
    for part in ("Tutorial", "How-to", "Reference", "Explanation"):
        assert part in contents


@pytest.mark.slow
def test_every_example_is_on_the_site_with_its_text(site: Path) -> None:
    text = (site / "examples.html").read_text()
    said = html.unescape(re.sub(r"<[^>]+>", "", text))
    for file in (ROOT / "examples").rglob("*.*"):
        if file.suffix in (".py", ".toml", ".yaml", ".service"):
            assert file.read_text().strip() in said, file.name


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, _Page]) -> None:
    for file, page in pages.items():
        for where in page.loads:
            assert not urlsplit(where).netloc, f"{file.name} loads {where}"
        # the one thing that the theme's own script would fetch from elsewhere
        assert 'class="mermaid"' not in file.read_text()
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text())


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Path, pages: dict[Path, _Page]) -> None:
    for file, page in pages.items():
        if file.name == "404.html":
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert there.exists(), f"{file.relative_to(site)} links to {link}"
            if parts.fragment and there in pages:
                assert unquote(parts.fragment) in pages[there].ids, f"{file.name} links to {link}"


def test_the_picture_is_what_its_script_draws_and_is_readable_in_light_and_dark() -> None:
    assert architecture.FILE.read_text() == architecture.picture(), f"run {architecture.__file__}"
    for colours in (architecture.LIGHT, architecture.DARK):
        for ink in ("text", "quiet", "mark"):
            for paper in ("page", "box", "table"):
                contrast = _contrast(colours[ink], colours[paper])
                assert contrast >= 4.5, (ink, paper, contrast)


def _contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it: 4.5 is enough for text of any size."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
