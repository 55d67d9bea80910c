"""saf from Airflow: an operator, a trigger and a sensor that run the command ``saf``.

    SafForwardOperator    forwards what is pending, once
    SafPendingTrigger     starts a DAG when something is pending, by an AssetWatcher
    SafForwardedSensor    waits until everything that was sent before a time has been forwarded

The command runs in an environment of its own: neither saf nor pyspark is installed beside Airflow,
and Airflow is not installed beside saf. `saf_airflow.command` says how it is run.
"""

from __future__ import annotations

from saf_airflow.assets import destination
from saf_airflow.command import Saf
from saf_airflow.forward import SafForwardOperator
from saf_airflow.forwarded import SafForwardedSensor, SafForwardedTrigger
from saf_airflow.pending import SafPendingTrigger

__all__ = [
    "Saf",
    "SafForwardOperator",
    "SafForwardedSensor",
    "SafForwardedTrigger",
    "SafPendingTrigger",
    "destination",
]
