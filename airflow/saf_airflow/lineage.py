"""OpenLineage: datasets for sources, destinations and their services.

    namespace   name
    saf         shop             the outbox of a source
    saf         mom              what arrives at a destination
    saf         mom/billing      what arrives there for a service

The assets ``saf://mom`` and ``saf://mom/billing`` are the same datasets, so a task whose ``inlets``
have such an asset follows the operator in the graph. OpenLineage calls these functions: without its
provider, nothing does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from saf_airflow.assets import destination

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Asset
    from openlineage.client.event_v2 import Dataset

NAMESPACE = "saf"


def name_of(asset: Asset) -> str:
    """Return the name of an asset's dataset."""
    parts = urlsplit(asset.uri)
    return f"{parts.netloc}{parts.path}".rstrip("/")


def dataset(asset: Asset, lineage_context: Any) -> Dataset:  # noqa: ARG001 - Airflow's signature
    """Return the dataset of an asset; Airflow calls it for inlets and outlets."""
    from openlineage.client.event_v2 import Dataset

    return Dataset(namespace=NAMESPACE, name=name_of(asset))


def of_run(said: Mapping[str, Any]) -> OperatorLineage:
    """Return the datasets of a run, from its JSON: which sources, what arrived where."""
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import InputDataset, OutputDataset
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    arrived = {}
    for place, services in said.get("by_service", {}).items():
        arrived[name_of(destination(place))] = sum(services.values())
        for service, messages in services.items():
            arrived[name_of(destination(place, service))] = messages
    return OperatorLineage(
        inputs=[
            InputDataset(namespace=NAMESPACE, name=name_of(destination(broker)))
            for broker in said.get("by_broker", {})
        ],
        outputs=[
            OutputDataset(
                namespace=NAMESPACE,
                name=name,
                outputFacets={
                    "outputStatistics": statistics.OutputStatisticsOutputDatasetFacet(
                        rowCount=messages
                    )
                },
            )
            for name, messages in arrived.items()
        ],
    )
