"""Rounds about Spark: ``python -m tests.crash --to transforms``, and ``--to stream``."""

from __future__ import annotations

from dataclasses import replace

from tests.crash.plan import HELD, SPARK_FAULTS, Plan, plan, transformed
from tests.crash.site import Site

FAULTS_OF_TRANSFORMS = (HELD, *SPARK_FAULTS[:5], HELD, *SPARK_FAULTS[5:])
FAULTS_OF_STREAMS = (
    "kill_stream",
    "crash_source",
    "kill_stream_worker",
    "crash_mom",
    "kill_stream",
    "terminate_source",
    "kill_stream",
    "terminate_mom",
    "kill_writer",
    "kill_forwarder",
)


class TransformSite(Site):
    """Where each round is on Spark, and transforms the messages of some services."""

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        made = plan(seed, number, kinds or FAULTS_OF_TRANSFORMS)
        return replace(made, spark=True, dialogs=False, transforms=transformed(seed, number))


class StreamSite(Site):
    """Where each round has streams."""

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        made = plan(seed, number, kinds or FAULTS_OF_STREAMS)
        return replace(made, spark=False, dialogs=False, streams=True)
