"""`make sbom`: a valid bill of materials, of what saf needs and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.sbom import main, normal


def test_it_is_valid_and_names_what_saf_with_its_extras_consists_of(tmp_path: Path) -> None:
    file = tmp_path / "build" / "sbom.cdx.json"
    main(file)
    text = file.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    names = {normal(one["name"]) for one in bill["components"]}
    assert bill["metadata"]["component"]["name"] == "saf-outbox"
    assert {"psycopg", "sqlalchemy", "alembic", "tenacity", "pyspark", "pyarrow"} <= names
    assert {"redis", "confluent-kafka", "starlette", "deltalake", "pyiceberg", "zeep"} <= names
    assert {"pytest", "mypy", "ruff", "pip-audit", "mkdocs-material"}.isdisjoint(names)
    for one in bill["components"]:
        assert one["purl"] == f"pkg:pypi/{normal(one['name'])}@{one['version']}"


def test_each_dependency_is_a_component(tmp_path: Path) -> None:
    main(file := tmp_path / "sbom.json")
    bill = json.loads(file.read_text())
    root = bill["metadata"]["component"]["bom-ref"]
    refs = {one["bom-ref"] for one in bill["components"]}
    graph = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    assert graph.keys() == refs | {root}
    seen, ahead = set(), [root]
    while ahead:
        for one in graph[ahead.pop()]:
            if one not in seen:
                seen.add(one)
                ahead.append(one)
    assert seen == refs
