"""A Delta table keeps what every kind has to keep, with processes that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saf.destinations.delta import Delta
from saf.testing.conformance import DestinationConformance, Read, WhileUnavailable
from tests.delta_table import messages
from tests.object_store import ObjectStore

pytestmark = [pytest.mark.full, pytest.mark.slow]


class TestDelta(DestinationConformance):
    @pytest.fixture
    def settings(self, tmp_path: Path) -> Delta:
        (tmp_path / "table").mkdir()
        return Delta(table=str(tmp_path / "table"))

    @pytest.fixture
    def stored(self, settings: Delta) -> Read:
        return lambda: messages(Path(settings.table))

    @pytest.fixture
    def unavailable(self, settings: Delta) -> WhileUnavailable:
        @contextmanager
        def down() -> Iterator[None]:
            """As if its disk were not mounted."""
            folder = Path(settings.table)
            away = folder.rename(folder.with_name("away"))
            try:
                yield
            finally:
                away.rename(folder)

        return down

    @pytest.fixture
    def refused(self, tmp_path: Path) -> Delta:
        (tmp_path / "file").write_text("no folder")
        return Delta(table=str(tmp_path / "file"))


@pytest.mark.full
class TestDeltaByService(TestDelta):
    """The same in files of services, with a column of bodies' members."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Delta:
        (tmp_path / "table").mkdir()
        return Delta(table=str(tmp_path / "table"), partition_by="service", promote={"a": "string"})


@pytest.mark.full
class TestDeltaInAnObjectStore(TestDelta):
    """The same in a bucket."""

    @pytest.fixture
    def bucket(self, objects: ObjectStore) -> str:
        return objects.bucket()

    @pytest.fixture
    def settings(self, objects: ObjectStore, bucket: str) -> Delta:
        return Delta(table=f"s3://{bucket}/table", storage_options=objects.secrets)

    @pytest.fixture
    def stored(
        self, objects: ObjectStore, bucket: str, tmp_path_factory: pytest.TempPathFactory
    ) -> Read:
        return lambda: messages(objects.copied(bucket, tmp_path_factory.mktemp("copy")) / "table")

    @pytest.fixture
    def unavailable(self, objects: ObjectStore, bucket: str) -> WhileUnavailable:
        return lambda: objects.down(bucket)

    @pytest.fixture
    def refused(self, objects: ObjectStore) -> Delta:
        table = f"s3://{objects.bucket('readonly')}/table"
        return Delta(table=table, storage_options=objects.secrets)
