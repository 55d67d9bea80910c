"""``make sbom``: what saf with all of its extras consists of, as a CycloneDX bill of materials.

It is about what is installed here, without the packages that only its development needs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.programs import ROOT

NAME = "saf-outbox"
OF_DEVELOPMENT = {"dev", "docs", "fuzz"}
ENVIRONMENT = ("-m", "cyclonedx_py", "environment", "--output-format", "JSON", "--spec-version")
VERSION = "1.6"


def normal(name: str) -> str:
    """A package's name as PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: frozenset[str] = frozenset()) -> Iterator[tuple[str, frozenset[str]]]:
    """The packages that an installed one needs here, each with its extras."""
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:  # on another platform
        return
    for line in lines:
        one = Requirement(line)
        environments = [{"extra": extra} for extra in (*extras, "")]
        if one.marker is None or any(one.marker.evaluate(each) for each in environments):
            yield normal(one.name), frozenset(one.extras)


def consists_of() -> set[str]:
    """The names of all packages of saf with its extras, itself among them."""
    offered = distribution(NAME).metadata.get_all("Provides-Extra") or []
    ahead = [(NAME, frozenset(offered) - OF_DEVELOPMENT)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while ahead:
        one = ahead.pop()
        if one not in seen:
            seen.add(one)
            ahead += needed(*one)
    return {name for name, _ in seen}


def bill() -> dict[str, Any]:
    """The bill of materials."""
    command = [sys.executable, *ENVIRONMENT, VERSION, "--pyproject", str(ROOT / "pyproject.toml")]
    command += ["--output-reproducible", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    whole: dict[str, Any] = json.loads(done.stdout)
    parts = consists_of()
    whole["components"] = [one for one in whole["components"] if normal(one["name"]) in parts]
    kept = {one["bom-ref"] for one in whole["components"]}
    kept.add(whole["metadata"]["component"]["bom-ref"])
    whole["dependencies"] = [
        {**one, "dependsOn": sorted(kept.intersection(one.get("dependsOn", ())))}
        for one in whole["dependencies"]
        if one["ref"] in kept
    ]
    return whole


def main(file: Path) -> None:
    """Write it."""
    written = bill()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    print(f"{file}: {len(written['components'])} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
