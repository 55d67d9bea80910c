"""The operator: one run of ``saf forward``.

exit code    the task
0            succeeds; is skipped if others already forward or, optionally, if nothing has arrived
75           is retried: a database does not answer; nothing is lost. Optionally, it succeeds if
             some messages have arrived
2            fails immediately: an operator must fix the settings, a schema or a login
others       are retried
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import AssetAlias, BaseOperator
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
)

from saf_airflow.assets import destination
from saf_airflow.command import MEND, TRY_AGAIN, Done, Saf, end, finish
from saf_airflow.connection import located, resolved

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

STOP_SECONDS = 4.0
"""Less than the 5 s that Airflow's supervisor waits between its SIGTERM and its SIGKILL."""

LEVELS = ("debug", "info", "warning", "error")


class SafForwardOperator(BaseOperator):
    """Forwards pending messages in all outboxes of a saf.toml once.

    It returns the JSON of ``saf forward --json``, with ``forwarded``, ``parked``, ``by_service``
    and more. The command's log, including its progress, appears in the task's log line by line.
    The assets ``saf://DESTINATION`` and ``saf://DESTINATION/SERVICE`` of arrived messages get an
    event each, with the count as its extra (`saf_airflow.destination`). A failed try creates no
    events, because Airflow takes events only from tasks that succeed.

    A task that is killed, or exceeds its ``execution_timeout``, ends the command with its child
    processes: by SIGTERM, so that the command finishes the chunk in hand, and after
    ``stop_seconds`` by SIGKILL. Nothing is lost in either case. If Airflow kills the task's process
    by SIGKILL, the command continues to its end.

    Args:
        saf: the location of the command, with its configuration.
        saf_conn_id: an Airflow connection with these settings; an alternative to ``saf``.
        arguments: further arguments of ``saf forward``, such as ``--spark``, ``always``. Templated.
        config: another saf.toml than that of ``saf`` or the connection. Templated.
        environment: further variables for the command. Templated, so Airflow's pages show them.
        skip_if_nothing: skip the task and its downstream tasks if nothing has arrived.
        succeed_in_part: succeed, with events, if messages have arrived although a database does not
            answer: tasks for one destination need not wait for another destination. The next run
            forwards the remaining messages.
        asset_alias: the alias by which assets get their events; None: no events.
        stop_seconds: time for the chunk in hand when the task is ended; Airflow kills the task's
            process after 5 s.
    """

    template_fields: Sequence[str] = ("arguments", "config", "environment")
    template_fields_renderers = {"environment": "json"}  # noqa: RUF012 - as in Airflow

    def __init__(
        self,
        *,
        saf: Saf | None = None,
        saf_conn_id: str | None = None,
        arguments: Sequence[str] = (),
        config: str | None = None,
        environment: Mapping[str, str] | None = None,
        skip_if_nothing: bool = False,
        succeed_in_part: bool = False,
        asset_alias: str | None = "saf",
        stop_seconds: float = STOP_SECONDS,
        **kwargs: Any,
    ) -> None:
        if asset_alias is not None:
            kwargs["outlets"] = [*_several(kwargs.get("outlets")), AssetAlias(asset_alias)]
        super().__init__(**kwargs)
        if saf is not None and saf_conn_id is not None:
            raise ValueError("say either saf or saf_conn_id")
        self.saf = saf
        self.saf_conn_id = saf_conn_id
        self.arguments = arguments
        self.config = config
        self.environment = environment
        self.skip_if_nothing = skip_if_nothing
        self.succeed_in_part = succeed_in_part
        self.asset_alias = asset_alias
        self.stop_seconds = stop_seconds
        self._process: subprocess.Popen[str] | None = None
        self._said: Mapping[str, Any] = {}

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the command and return its JSON."""
        saf = located(self.saf, self.saf_conn_id, config=self.config, environment=self.environment)
        try:
            saf = resolved(saf)
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
        try:
            self._process = saf.start(
                "forward", "--json", "--progress-every", "10", *self.arguments
            )
        except OSError as error:
            raise AirflowFailException(
                f"{saf.command} cannot be started: {error.strerror}. Say where saf is: "
                "SafForwardOperator(saf=Saf(command=…)), or a connection's extra"
            ) from None
        try:
            done = finish(self._process, self._say)
        except BaseException:
            self.on_kill()
            raise
        self._said = done.said
        self._judge(done)
        self._tell(context, done.said["by_service"])
        return done.said

    def get_openlineage_facets_on_complete(
        self,
        task_instance: Any,  # noqa: ARG002 - OpenLineage's signature
    ) -> OperatorLineage:
        """Return the datasets of the run, also of one that failed in part."""
        from saf_airflow.lineage import of_run

        return of_run(self._said)

    def on_kill(self) -> None:
        """End the command with its child processes."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            end(process.pid, signal.SIGTERM)
            try:
                process.wait(self.stop_seconds)
            except subprocess.TimeoutExpired:
                self.log.warning("saf has not ended within %g s: it is killed", self.stop_seconds)
        end(process.pid, signal.SIGKILL)

    def _judge(self, done: Done) -> None:
        outcome = f"saf forward has ended with exit code {done.code}"
        suffix = f": {cause}" if (cause := reasons(done)) else ""
        if done.code == MEND:
            raise AirflowFailException(f"{outcome}: an operator must fix something{suffix}")
        arrived = done.said.get("by_service")
        if done.code == TRY_AGAIN and self.succeed_in_part and arrived:
            self.log.warning("%s, and only in part%s", outcome, suffix)
        elif done.code != 0:
            hint = "a database does not answer, and nothing is lost" * (done.code == TRY_AGAIN)
            raise AirflowException(f"{outcome}{hint and ': ' + hint}{suffix}")
        if arrived is None:
            raise AirflowException(f"{outcome}, and has not said what has arrived{suffix}")
        if waiting := done.said.get("waiting_lanes"):
            self.log.warning("messages wait in %d lanes%s", waiting, suffix)
        if done.said.get("idle"):
            raise AirflowSkipException("other forwarders hold all shards: there is nothing to do")
        if done.said.get("stopped"):
            raise AirflowException("saf was stopped before its end; what is left waits")
        if self.skip_if_nothing and not arrived:
            raise AirflowSkipException("nothing has arrived anywhere")

    def _tell(self, context: Context, by_service: Mapping[str, Mapping[str, int]]) -> None:
        """Create events for the assets of arrived messages."""
        if self.asset_alias is None:
            return
        events = context["outlet_events"][AssetAlias(self.asset_alias)]
        for name, services in by_service.items():
            events.add(destination(name), extra={"messages": sum(services.values())})
            for service, messages in services.items():
                events.add(destination(name, service), extra={"messages": messages})

    def _say(self, line: str) -> None:
        """Copy a line of the command's log, in JSON, to the task's log at the same level."""
        try:
            event = json.loads(line)
            level = event.pop("log_level", "info") if isinstance(event, dict) else "info"
        except ValueError:
            level = "info"
        if level not in LEVELS:
            level = "info"
        getattr(self.log, level)("%s", line)


def reasons(done: Done) -> str:
    """Return errors and reasons for waiting, each once; from the JSON, or else from the log."""
    problems = [*done.said.get("problems", ()), *done.said.get("waiting", ())]
    return "; ".join(dict.fromkeys(str(problem["error"]) for problem in problems)) or done.errors


def _several(outlets: Any) -> list[Any]:
    if outlets is None:
        return []
    return list(outlets) if isinstance(outlets, Sequence) else [outlets]
