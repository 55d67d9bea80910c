"""The sensor: waits until all messages sent before a time have been forwarded.

It runs ``saf outbox forwarded``, and succeeds once no older message is pending or parked. Later
messages do not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from saf_airflow.command import MEND, Done, Saf
from saf_airflow.connection import aresolved, located, resolved

if TYPE_CHECKING:
    from airflow.sdk import Context

FORWARDED, WAITS, DEAD, BROKEN = "forwarded", "waits", "dead", "broken"


class SafForwardedSensor(BaseSensorOperator):
    """Waits until all messages sent before a time have been forwarded.

    It fails immediately if the configuration is broken, or if a message has become a dead letter,
    which is not forwarded before an operator decides.

    Args:
        until: the time. Default: the scheduled time of the DAG's run.
        since: ignore messages from before this time. Default: all count.
        service: only messages for this service.
        broker: only this broker, or fleet, of saf.toml.
        allow_dead: count dead letters as forwarded.
        saf: the location of the command, with its configuration.
        saf_conn_id: an Airflow connection with these settings; an alternative to ``saf``.
        config: another saf.toml than that of ``saf`` or the connection.
        environment: further variables for the command.
        deferrable: wait in the triggerer, without occupying a worker slot.
    """

    template_fields: Sequence[str] = (
        *("until", "since", "service", "broker"),
        *("config", "environment"),
    )
    template_fields_renderers = {"environment": "json"}  # noqa: RUF012 - as in Airflow

    def __init__(
        self,
        *,
        until: str = "{{ dag_run.run_after.isoformat() }}",
        since: str | None = None,
        service: str | None = None,
        broker: str | None = None,
        allow_dead: bool = False,
        saf: Saf | None = None,
        saf_conn_id: str | None = None,
        config: str | None = None,
        environment: Mapping[str, str] | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.until = until
        self.since = since
        self.service = service
        self.broker = broker
        self.allow_dead = allow_dead
        self.saf = saf
        self.saf_conn_id = saf_conn_id
        self.config = config
        self.environment = environment
        self.deferrable = deferrable

    def execute(self, context: Context) -> Any:
        """Wait here, or in the triggerer."""
        if not self.deferrable:
            return super().execute(context)
        if not self.poke(context):
            saf = self._located()
            self.defer(
                trigger=SafForwardedTrigger(
                    command=saf.command,
                    config=saf.config,
                    environment=saf.environment,
                    connections=saf.connections,
                    question=self._question(),
                    poll_seconds=self.poke_interval,
                ),
                method_name="execute_complete",
                timeout=self._left(),
            )
        return None

    def poke(self, context: Context) -> bool:  # noqa: ARG002 - Airflow's signature
        """Ask once."""
        try:
            saf = resolved(self._located())
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
        return self._judged(*asyncio.run(asked(saf, self._question())))

    def execute_complete(
        self,
        context: Context,  # noqa: ARG002 - Airflow's signature
        event: Mapping[str, str],
    ) -> None:
        """Continue after the triggerer has finished."""
        if not self._judged(event["state"], event["said"]):
            raise AirflowFailException(f"the trigger has ended too early: {dict(event)}")

    def _located(self) -> Saf:
        return located(self.saf, self.saf_conn_id, config=self.config, environment=self.environment)

    def _judged(self, state: str, reason: str) -> bool:
        if state == BROKEN:
            raise AirflowFailException(f"an operator must fix a problem: {reason}")
        if state == DEAD and not self.allow_dead:
            raise AirflowFailException(
                f"a dead letter will not be forwarded before a person has decided: {reason}"
            )
        if state == WAITS:
            self.log.info("not yet: %s", reason)
        return state != WAITS

    def _question(self) -> list[str]:
        words = ["outbox", "forwarded", "--json", "--until", str(self.until)]
        filters = {"--since": self.since, "--service": self.service, "--broker": self.broker}
        for name, value in filters.items():
            if value is not None:
                words += [name, str(value)]
        return words

    def _left(self) -> Any:
        from datetime import timedelta

        return timedelta(seconds=self.timeout)


class SafForwardedTrigger(BaseTrigger):
    """Fires once, when the wait is over; see `SafForwardedSensor`."""

    def __init__(
        self,
        *,
        command: str,
        question: Sequence[str],
        config: str | None = None,
        environment: Mapping[str, str] | None = None,
        connections: Mapping[str, str] | None = None,
        poll_seconds: float = 60.0,
    ) -> None:
        super().__init__()
        self.saf = Saf(
            command=command,
            config=config,
            environment=environment or {},
            connections=connections or {},
        )
        self.question = list(question)
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments that recreate this trigger elsewhere."""
        return (
            f"{__name__}.{type(self).__qualname__}",
            {
                "command": self.saf.command,
                "config": self.saf.config,
                "environment": dict(self.saf.environment),
                "connections": dict(self.saf.connections),
                "question": self.question,
                "poll_seconds": self.poll_seconds,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Run the command repeatedly until the wait is over."""
        while True:
            try:
                saf = await aresolved(self.saf)
            except ValueError as error:
                yield TriggerEvent({"state": BROKEN, "said": str(error)})
                return
            state, reason = await asked(saf, self.question)
            if state != WAITS:
                yield TriggerEvent({"state": state, "said": reason})
                return
            await asyncio.sleep(self.poll_seconds)


async def asked(saf: Saf, question: Sequence[str], **options: float) -> tuple[str, str]:
    """Run the command once; return a state, and a text for humans."""
    try:
        return answer(await saf.ask(*question, **options))
    except TimeoutError as error:  # also an OSError
        return WAITS, f"{saf.command} does not answer: {error}"
    except OSError as error:
        return BROKEN, f"{saf.command} cannot be started: {error}"


def answer(done: Done) -> tuple[str, str]:
    """Return the command's answer as a state, and a text for humans."""
    brokers = done.said.get("brokers", [])
    if done.code == 0 and brokers:
        return FORWARDED, ""
    left = [f"{entry['broker']}: {', '.join(entry['left'])}" for entry in brokers if entry["left"]]
    errors = [f"{entry['broker']}: {entry['error']}" for entry in done.said.get("errors", ())]
    reason = "; ".join([*left, *errors]) or done.errors
    if done.code == MEND:
        return BROKEN, reason
    if done.code == 1 and brokers and not any(entry["waits"] for entry in brokers):
        return DEAD, reason
    return WAITS, reason
