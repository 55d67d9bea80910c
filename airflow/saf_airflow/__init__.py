"""saf from Airflow: an operator, a trigger, a sensor and a hook that run the command ``saf``.

    SafForwardOperator    forwards pending messages once
    SafPendingTrigger     starts a DAG when messages are pending, by an AssetWatcher
    SafForwardedSensor    waits until all messages sent before a time have been forwarded
    SafHook               runs any command of saf; a connection of type "saf" describes it

The command runs in a separate environment: neither saf nor pyspark is installed beside Airflow, and
Airflow is not installed beside saf. `saf_airflow.command` describes how it runs.
"""

from __future__ import annotations

from saf_airflow.assets import destination
from saf_airflow.command import Saf
from saf_airflow.connection import SafHook
from saf_airflow.forward import SafForwardOperator
from saf_airflow.forwarded import SafForwardedSensor, SafForwardedTrigger
from saf_airflow.pending import SafPendingTrigger

__all__ = [
    "Saf",
    "SafForwardOperator",
    "SafForwardedSensor",
    "SafForwardedTrigger",
    "SafHook",
    "SafPendingTrigger",
    "destination",
]
