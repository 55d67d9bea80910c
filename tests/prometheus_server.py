"""A real Prometheus, and programs of saf that it scrapes."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from saf_demo.servers import free_port
from tests.needed import needed
from tests.programs import BIN, ROOT, environment
from tests.scraping import served
from tests.waits import until

RULES = ROOT / "ops" / "prometheus" / "rules.yaml"


def get(where: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://{where}", timeout=10) as answer:
            return json.loads(answer.read())["data"]
    except (urllib.error.URLError, ConnectionError):
        return None


@contextmanager
def prometheus(folder: Path, *targets: int, seconds: int = 1) -> Iterator[str]:
    """A Prometheus that scrapes ports of this machine; alerts fire without waiting."""
    brief = yaml.safe_load(RULES.read_text())
    for rule in brief["groups"][0]["rules"]:
        rule.pop("for", None)
    brief["groups"][0]["interval"] = "1s"
    (folder / "rules.yaml").write_text(yaml.safe_dump(brief))
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": f"{seconds}s", "scrape_timeout": f"{seconds}s"},
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {
                        "job_name": "saf",
                        "static_configs": [{"targets": [f"127.0.0.1:{one}" for one in targets]}],
                    }
                ],
            }
        )
    )
    port = free_port()
    command = [
        needed("prometheus", "prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: served(port))
            yield f"127.0.0.1:{port}/api/v1"
        finally:
            process.terminate()
            process.wait(timeout=30)


@contextmanager
def started(*arguments: object, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The command ``saf``, until the block ends."""
    command = [str(one) for one in (BIN / "saf", *arguments)]
    with subprocess.Popen(
        command,
        env=environment(),
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)


def query(at: str, expression: str) -> list[Any]:
    """The series of an expression, now."""
    words = urllib.parse.urlencode({"query": expression})
    found: list[Any] = (get(f"{at}/query?{words}") or {}).get("result", [])
    return found
