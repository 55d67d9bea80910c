"""Metadata of saf-airflow for Airflow: the connection type with its form, and the classes.

Airflow calls it while it reads its own configuration, when nothing of Airflow can be imported yet.
So this is a module beside the package, and not in it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

PACKAGE = "saf-airflow"
NAME = "saf"

FORM = {
    "command": {
        "label": "Command",
        "description": "Path of the command saf on the workers. Default: /opt/saf/bin/saf.",
        "schema": {"type": ["string", "null"]},
    },
    "config": {
        "label": "saf.toml",
        "description": "Path of its configuration. Default: $SAF_CONFIG.",
        "schema": {"type": ["string", "null"]},
    },
    "connections": {
        "label": "DSNs from connections",
        "description": (
            "Variables that saf.toml names, with the ids of the Airflow connections whose DSN they "
            'get: {"SHOP_DSN": "shop_db"}.'
        ),
        "schema": {"type": ["object", "null"]},
    },
    "environment": {
        "label": "Variables",
        "description": 'Further variables for saf: {"SAF_FORWARDER__CHUNK_ROWS": "10000"}.',
        "schema": {"type": ["object", "null"]},
    },
}
"""Fields of the connection's form; Airflow 3.1 shows them as JSON."""


def get_provider_info() -> dict[str, Any]:
    """Return the provider's metadata, for the entry point ``apache_airflow_provider``."""
    return {
        "package-name": PACKAGE,
        "name": NAME,
        "description": "Forward PostgreSQL outboxes with the command saf.",
        "versions": [version(PACKAGE)],
        "integrations": [{"integration-name": NAME, "tags": ["service"]}],
        "operators": [
            {"integration-name": NAME, "python-modules": ["saf_airflow.forward"]},
        ],
        "sensors": [
            {"integration-name": NAME, "python-modules": ["saf_airflow.forwarded"]},
        ],
        "triggers": [
            {
                "integration-name": NAME,
                "python-modules": ["saf_airflow.forwarded", "saf_airflow.pending"],
            },
        ],
        "hooks": [
            {"integration-name": NAME, "python-modules": ["saf_airflow.connection"]},
        ],
        "connection-types": [
            {
                "connection-type": "saf",
                "hook-class-name": "saf_airflow.connection.SafHook",
                "hook-name": "saf (store and forward)",
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "schema", "login", "password"],
                    "relabeling": {},
                    "placeholders": {},
                },
                "conn-fields": FORM,
            }
        ],
        "asset-uris": [
            {
                "schemes": ["saf"],
                "handler": None,
                "to_openlineage_converter": "saf_airflow.lineage.dataset",
            }
        ],
    }
