"""A test kit for applications, as a pytest plugin; docs/testing.md has examples.

    pytest_plugins = ["saf.testing"]         in the conftest.py at the root

Fixtures:   `saf_database`, `saf_new_database`, `saf_template`, `saf_outbox`, `saf_drain`,
            `saf_clock`, `saf_server`
Django:      `django_database`
Types:       `Database`, `Copies`, `Sent`, `Drain`, `Clock`, `Databases`
Errors:     `DrainFailed`

A project names the plugin itself. It has no entry point, because pytest would import it into
every test run of every project that has this package installed. Importing the plugin is cheap:
the first fixture that needs them imports Alembic, Arrow and the embedded server.

PYTEST_DONT_REWRITE: no assert in here has values that pytest would need to show, and a conftest.py
may import from here before it names the plugin.
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
from saf.testing.with_django import django_database

__all__ = [
    "Clock",
    "Copies",
    "Database",
    "Databases",
    "Drain",
    "DrainFailed",
    "Drained",
    "Sent",
    "django_database",
    "pytest_addoption",
    "saf_clock",
    "saf_database",
    "saf_drain",
    "saf_new_database",
    "saf_outbox",
    "saf_server",
    "saf_template",
]
