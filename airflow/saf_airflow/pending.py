"""The trigger: starts a DAG when messages are pending.

    watcher = AssetWatcher(name="saf", trigger=SafPendingTrigger(config="/etc/saf/saf.toml"))
    waiting = Asset("saf_pending", watchers=[watcher])

    with DAG("saf_forward", schedule=[waiting], max_active_runs=1): …

It runs ``saf outbox list``, which reads little even with a deep backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from saf_airflow.command import Done, Saf
from saf_airflow.connection import aresolved, of_connection, settled

STATES = ("pending", "parked")


class SafPendingTrigger(BaseEventTrigger):
    """Fires when an outbox has a pending or parked message.

    It fires again after ``again_seconds`` while there are such messages: a run of the forwarder
    retries parked messages, and the next run makes up for one that did not finish. The trigger
    never ends on its own: it logs errors, and tries again.

    Args:
        command: path of the command ``saf``.
        config: its saf.toml.
        environment: further variables for the command.
        connections: variables that get the DSN of an Airflow connection: its id by their name.
        saf_conn_id: an Airflow connection with these settings; ``command`` and ``connections`` are
            then the connection's.
        poll_seconds: interval of polling while nothing is pending.
        again_seconds: pause after firing.
    """

    def __init__(
        self,
        *,
        command: str = Saf.command,
        config: str | None = None,
        environment: Mapping[str, str] | None = None,
        connections: Mapping[str, str] | None = None,
        saf_conn_id: str | None = None,
        poll_seconds: float = 10.0,
        again_seconds: float = 60.0,
    ) -> None:
        super().__init__()
        self.saf = Saf(
            command=command,
            config=config,
            environment=environment or {},
            connections=connections or {},
        )
        self.saf_conn_id = saf_conn_id
        self.poll_seconds = poll_seconds
        self.again_seconds = again_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments that recreate this trigger elsewhere."""
        return (
            f"{__name__}.{type(self).__qualname__}",
            {
                "command": self.saf.command,
                "config": self.saf.config,
                "environment": dict(self.saf.environment),
                "connections": dict(self.saf.connections),
                "saf_conn_id": self.saf_conn_id,
                "poll_seconds": self.poll_seconds,
                "again_seconds": self.again_seconds,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll, and fire."""
        while True:
            found = await self._found()
            if found:
                yield TriggerEvent(found)
            await asyncio.sleep(self.again_seconds if found else self.poll_seconds)

    async def _found(self) -> dict[str, list[str]]:
        """Return the brokers that have messages of each state; empty without any messages."""
        found: dict[str, list[str]] = {}
        try:
            saf = await self._resolved()
        except (AirflowException, ValueError) as error:
            self.log.error("%s", error)  # noqa: TRY400 - readers need no traceback
            return {}
        for state in STATES:
            try:
                done = await saf.ask(
                    *("outbox", "list", "--sources"),
                    *("--state", state, "--limit", "1", "--json"),
                )
            except (OSError, TimeoutError) as error:
                self.log.error(  # noqa: TRY400 - readers need no traceback
                    "%s cannot be asked: %s", saf.command, error
                )
                return {}
            if done.code:
                self.log.warning("saf outbox list: exit code %d: %s", done.code, _said(done))
            brokers = {row["broker"] for row in done.said.get("messages", ())}
            if brokers:
                found[state] = sorted(brokers)
        return found

    async def _resolved(self) -> Saf:
        if self.saf_conn_id is None:
            return await aresolved(self.saf)
        described = of_connection(await BaseHook.aget_connection(self.saf_conn_id))
        return await aresolved(settled(described, self.saf.config, self.saf.environment))


def _said(done: Done) -> str:
    errors = [f"{row['broker']}: {row['error']}" for row in done.said.get("errors", ())]
    return "; ".join(errors) or done.errors
