"""Forward pending outbox messages once a minute, from Airflow 2.9 or later, or 3.

This is a single file, and needs no package beside Airflow. With Airflow 3, the package in airflow/
does more: results and assets for other DAGs, and a DAG that starts when messages are pending;
docs/airflow.md compares the two.

Copy this file into the DAGs folder. On the workers, ``saf-outbox[forwarder]`` is installed in
/opt/saf (or set SAF_COMMAND), and the configuration is /etc/saf/saf.toml (or set SAF_CONFIG), whose
``${NAME}`` come from the worker's environment.

Exit codes and their effects here (docs/operations.md has them for other schedulers):
    0    success; also if messages wait for a route or a service, which another run cannot help
    75   a database does not answer; nothing is lost. Retried twice, after 30 seconds each; then
         the schedule's next run continues. The pauses are short because a waiting run holds up
         all other messages
    2    an operator must fix the settings, a schema or a login: fails immediately
    1    fails after the same retries
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

try:
    from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
except ImportError:  # older Airflow
    from airflow.exceptions import AirflowFailException, AirflowSkipException

try:
    from airflow.providers.standard.operators.bash import BashOperator
    from airflow.sdk import DAG
except ImportError:  # Airflow 2
    from airflow import DAG  # type: ignore[attr-defined, no-redef, unused-ignore]
    from airflow.operators.bash import BashOperator

if TYPE_CHECKING:
    from collections.abc import Mapping

USAGE = 2  # an exit code of `saf forward`


class Forward(BashOperator):  # type: ignore[misc] # Airflow is not installed here
    """A BashOperator that does not retry errors that only an operator can fix."""

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the command."""
        try:
            return super().execute(context)
        except AirflowSkipException:
            raise AirflowFailException(
                f"exit code {USAGE}: an operator must fix a problem; the log names it"
            ) from None


with DAG(
    dag_id="saf_forward",
    description="Forward pending outbox messages",
    schedule=timedelta(minutes=1),
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),  # noqa: UP017 - Airflow may run on an older Python
    catchup=False,
    # overlapping runs would share the work, but a second run gains nothing
    max_active_runs=1,
    tags=["saf"],
):
    Forward(
        task_id="forward",
        # exec: the signal that ends a task reaches the forwarder, which finishes the chunk in hand
        bash_command=(
            'export SAF_CONFIG="${SAF_CONFIG:-/etc/saf/saf.toml}"; '
            'exec "${SAF_COMMAND:-/opt/saf/bin/saf}" forward --json'
        ),
        append_env=True,
        skip_on_exit_code=USAGE,
        retries=2,
        retry_delay=timedelta(seconds=30),
        retry_exponential_backoff=False,
        execution_timeout=timedelta(hours=6),
    )
