"""Routers: services that stand for others, and the classifiers that choose among them.

A router has a classifier of one of four kinds:

    sql        a Spark SQL expression over the columns of a message
    arrow      ``module:function``: takes a pyarrow.RecordBatch of messages, returns an array
    python     ``module:function``: takes a `saf.Received`, returns one answer
    function   ``schema.function``, of the broker's database: takes a body, returns a service;
               see `saf.routing.functions`

An answer is the name of a service, or a `saf.Resolved`, which may also name a broker and a key.
None means that the classifier has no answer. An Arrow function answers with an array of names, or
with a record batch with the columns service, and optionally broker and key.

A router works in one of two modes. A router that redirects is run by the forwarder, in its tasks,
where it reads the messages (`saf.engine.resolving`). A router that forwards has its service at a
broker of its own, where a `saf.routing_service` receives, classifies and sends on. An expression in
SQL needs Spark, so its router redirects. A function of the database is called in the transaction
that receives, so its router forwards: a forwarder would call it with the forwarder's rights.

When a batch is read again, the classifier is called again for each message without a remembered
answer. So it must give the same answer to the same message.

If a router's function cannot be imported where a batch is opened, the router is frozen with that
problem, and its messages wait: a deployment mistake makes no dead letters. A routing service with
this problem ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from typing import Any

import psycopg

from saf.database import fetch
from saf.errors import ConfigurationError, UsageError
from saf.routing import functions
from saf.routing.local import refuse_local
from saf.routing.matching import (
    ARROW,
    FORWARD,
    FUNCTION,
    KEY,
    MESSAGE,
    PYTHON,
    REDIRECT,
    SQL,
    Router,
    Routes,
    check_name,
)
from saf.routing.routes import NOTHING, ConfiguredRouter, Declared

IS_TOPIC = "SELECT name FROM saf.topic WHERE name = %(service)s"

# An upsert: with delete and insert, a router that is added again would be missing for a moment
ADD = """
INSERT INTO saf.router AS r (service, kind, expression, once_per, mode, comment)
VALUES (%(service)s, %(kind)s, %(expression)s, %(once_per)s, %(mode)s, %(comment)s)
ON CONFLICT (service) DO UPDATE SET
    kind = excluded.kind, expression = excluded.expression, once_per = excluded.once_per,
    mode = excluded.mode, comment = excluded.comment, enabled = true
RETURNING xmax = 0
"""
STAND_IN = """
INSERT INTO saf.router (service, kind, expression, once_per, mode, comment)
VALUES (%(service)s, %(kind)s, %(expression)s, %(once_per)s, %(mode)s, %(comment)s)
ON CONFLICT DO NOTHING
"""
REMOVE = "DELETE FROM saf.router WHERE service = %(service)s RETURNING service"
ENABLE = """
UPDATE saf.router SET enabled = %(enabled)s WHERE service = %(service)s RETURNING service
"""
NAMES = "SELECT service FROM saf.router ORDER BY service"


def add_router(
    connection: psycopg.Connection[Any],
    service: str,
    kind: str,
    expression: str,
    *,
    once_per: str = MESSAGE,
    mode: str = REDIRECT,
    comment: str | None = None,
) -> bool:
    """Add a router: its classifier names the actual service of each message for ``service``.

    An existing router gets these values and is enabled; then the result is False.

    Raises:
        UsageError: a name that no message could have, or a topic's name; an unknown kind or
            mode; a function not written as ``module:function`` or ``schema.function``; SQL in a
            router that forwards, or a function of the database in one that redirects.
    """
    router = Router(service=service, kind=kind, expression=expression, once_per=once_per)
    configured = ConfiguredRouter(router=router, origin="saf.router", mode=mode, comment=comment)
    check(configured)
    params = _params(configured)
    if fetch(connection, IS_TOPIC, params):
        raise UsageError(f"{service!r} is a topic: a router may resolve to it, but not be one")
    refuse_local(connection, service, "a router")
    ((added,),) = fetch(connection, ADD, params)
    return bool(added)


def remove_router(connection: psycopg.Connection[Any], service: str) -> None:
    """Remove a router: its service is an ordinary service again.

    Raises:
        ConfigurationError: the router does not exist.
    """
    _change(connection, REMOVE, service)


def enable_router(
    connection: psycopg.Connection[Any],
    service: str,
    *,
    enabled: bool = True,
    declared: Declared = NOTHING,
) -> None:
    """Enable or disable a router; for a declared router, by a row that stands in for it.

    Raises:
        ConfigurationError: the router does not exist.
    """
    with connection.transaction():
        for item in declared.routers:
            if item.router.service == service:
                connection.execute(STAND_IN, _params(item))
        _change(connection, ENABLE, service, enabled=enabled)


def check(one: ConfiguredRouter) -> None:
    """Raise a `UsageError` for a router that cannot work."""
    router = one.router
    check_name("router", router.service)
    if one.mode not in (REDIRECT, FORWARD):
        raise UsageError(f"mode {one.mode!r}: a router will {REDIRECT} or {FORWARD}")
    if router.kind not in (SQL, ARROW, PYTHON, FUNCTION):
        kinds = f"{SQL}, {ARROW}, {PYTHON} or {FUNCTION}"
        raise UsageError(f"kind {router.kind!r}: a classifier is {kinds}")
    if router.once_per not in (MESSAGE, KEY):
        raise UsageError(f"once_per {router.once_per!r}: once per {MESSAGE} or per {KEY}")
    if router.kind == FUNCTION:
        functions.parsed(router)
    module, colon, function = router.expression.partition(":")
    if router.kind in (ARROW, PYTHON) and not (module and colon and function):
        raise UsageError(f"router {router.service!r}: {router.expression!r} is not module:function")
    if not router.expression.strip():
        raise UsageError(f"router {router.service!r} has an empty expression")
    if one.mode == FORWARD and router.kind == SQL:
        raise UsageError(
            f"router {router.service!r} is in SQL, which needs Spark: a router that forwards has a "
            f"classifier in Python, {ARROW} or {PYTHON}, or a {FUNCTION} of its database"
        )
    if one.mode == REDIRECT and router.kind == FUNCTION:
        raise UsageError(
            f"router {router.service!r} calls a function of the database, which only a routing "
            f'service does: add --mode {FORWARD} (in a file: mode = "{FORWARD}")'
        )


def load(router: Router) -> Callable[[Any], Any]:
    """Import the function of a classifier.

    Raises:
        ConfigurationError: the name cannot be imported here, or is not a function.
    """
    return imported(f"router {router.service!r}", router.expression)


def imported(whose: str, name: str) -> Callable[[Any], Any]:
    """Import an application's function, ``module:function``; ``whose`` names its user in errors.

    Raises:
        ConfigurationError: the name cannot be imported here, or is not a function.
    """
    module, _, path = name.partition(":")
    try:
        function = attrgetter(path)(import_module(module))
    except Exception as error:
        raise ConfigurationError(
            f"{whose} cannot load {name!r} ({type(error).__name__}: {error}): its module must be "
            "importable wherever the forwarder and its tasks run, by PYTHONPATH or spark-submit's "
            "--py-files"
        ) from error
    if not callable(function):
        raise ConfigurationError(
            f"{whose}: {name!r} is not a function, but a {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return] # its signature is unknown


def with_problems(routes: Routes) -> Routes:
    """Return the routes; a router whose function cannot be imported here gets that problem."""
    return replace(routes, routers=tuple(_with_problem(item) for item in routes.routers))


def _with_problem(router: Router) -> Router:
    if router.kind in (SQL, FUNCTION):
        return router  # only Spark, or the database, can check it
    try:
        load(router)
    except ConfigurationError as error:
        return replace(router, problem=str(error))
    return router


def as_dict(one: ConfiguredRouter) -> dict[str, Any]:
    """Return a configured router as a dict for JSON."""
    return {**_params(one), "enabled": one.enabled, "origin": one.origin}


def _params(configured: ConfiguredRouter) -> dict[str, Any]:
    return {
        "service": configured.router.service,
        "kind": configured.router.kind,
        "expression": configured.router.expression,
        "once_per": configured.router.once_per,
        "mode": configured.mode,
        "comment": configured.comment,
    }


def _change(
    connection: psycopg.Connection[Any], statement: str, service: str, **more: object
) -> None:
    if not fetch(connection, statement, {"service": service, **more}):
        known = ", ".join(repr(name) for (name,) in fetch(connection, NAMES)) or "none"
        raise ConfigurationError(f"saf.router has no {service!r}, only {known}")
