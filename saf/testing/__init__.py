"""A test kit for applications, as a pytest plugin: docs/testing.md has the examples.

    pytest_plugins = ["saf.testing"]         in the conftest.py at the root

Fixtures:   `saf_database`, `saf_new_database`, `saf_template`, `saf_outbox`, `saf_drain`,
            `saf_clock`, `saf_server`
Their types: `Database`, `Copies`, `Sent`, `Drain`, `Clock`, `Databases`
Errors:     `DrainFailed`

A project names the plugin itself; it is not found by an entry point, because pytest would import it
into every run of every project that has this package installed. Importing it is cheap: Alembic,
Arrow and the embedded server are imported by the first fixture that needs them.

PYTEST_DONT_REWRITE: there is no assert in here whose values pytest would have to show, and a
conftest.py may import from here before it names the plugin.
"""

from saf.testing.clock import Clock
from saf.testing.databases import Copies, Database, Databases
from saf.testing.drain import Drain, Drained, DrainFailed
from saf.testing.fixtures import (
    pytest_addoption,
    saf_clock,
    saf_database,
    saf_drain,
    saf_new_database,
    saf_outbox,
    saf_server,
    saf_template,
)
from saf.testing.sent import Sent

__all__ = [
    "Clock",
    "Copies",
    "Database",
    "Databases",
    "Drain",
    "DrainFailed",
    "Drained",
    "Sent",
    "pytest_addoption",
    "saf_clock",
    "saf_database",
    "saf_drain",
    "saf_new_database",
    "saf_outbox",
    "saf_server",
    "saf_template",
]
