"""`make sbom`: a valid bill of materials, of what saf needs and of nothing else."""

from __future__ import annotations

import json

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.sbom import main, normal

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `make sbom` writes; that takes seconds."""
    file = tmp_path_factory.mktemp("sbom") / "build" / "sbom.cdx.json"
    main(file)
    return file.read_text()


def test_it_is_valid_and_names_what_saf_with_its_extras_consists_of(text: str) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    names = {normal(one["name"]) for one in bill["components"]}
    assert bill["metadata"]["component"]["name"] == "saf-outbox"
    assert {"psycopg", "sqlalchemy", "alembic", "tenacity", "pyspark", "pyarrow"} <= names
    assert {"redis", "confluent-kafka", "starlette", "deltalake", "pyiceberg", "zeep"} <= names
    assert {"pytest", "mypy", "ruff", "pip-audit", "mkdocs-material"}.isdisjoint(names)
    for one in bill["components"]:
        assert one["purl"] == f"pkg:pypi/{normal(one['name'])}@{one['version']}"


def test_each_dependency_is_a_component(text: str) -> None:
    bill = json.loads(text)
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
