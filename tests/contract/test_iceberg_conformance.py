"""An Iceberg table keeps what every kind has to keep, with processes that are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from saf.database import Dsn
from saf.destinations.iceberg import Iceberg
from saf.testing.conformance import DestinationConformance, Read, WhileUnavailable
from tests.iceberg_table import in_postgresql, messages
from tests.object_store import ObjectStore

pytestmark = [pytest.mark.full, pytest.mark.slow]


class TestIceberg(DestinationConformance):
    """With its catalog beside it, in SQLite."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Iceberg:
        (tmp_path / "lake").mkdir()
        return Iceberg(
            catalog=f"sqlite:///{tmp_path}/lake/catalog.db",
            table="shop.messages",
            warehouse=str(tmp_path / "lake"),
        )

    @pytest.fixture
    def stored(self, settings: Iceberg) -> Read:
        return lambda: messages(settings)

    @pytest.fixture
    def unavailable(self, settings: Iceberg) -> WhileUnavailable:
        @contextmanager
        def down() -> Iterator[None]:
            """As if its disk were not mounted."""
            folder = settings.folder
            assert folder is not None
            away = folder.rename(folder.with_name("away"))
            try:
                yield
            finally:
                away.rename(folder)

        return down

    @pytest.fixture
    def refused(self, tmp_path: Path) -> Iceberg:
        (tmp_path / "file").write_text("no folder")
        return Iceberg(
            catalog=f"sqlite:///{tmp_path}/catalog.db",
            table="shop.messages",
            warehouse=str(tmp_path / "file"),
        )


@pytest.mark.full
class TestIcebergInPostgresql(TestIceberg):
    """With its catalog in PostgreSQL, by service, with a column of bodies' members."""

    @pytest.fixture
    def settings(self, tmp_path: Path, new_database: Callable[[str], Dsn]) -> Iceberg:
        (tmp_path / "lake").mkdir()
        return Iceberg(
            **in_postgresql(new_database("catalog")),
            table="shop.messages",
            warehouse=str(tmp_path / "lake"),
            partition_by="service",
            promote={"a": "string"},
        )

    @pytest.fixture
    def refused(self, settings: Iceberg) -> Iceberg:
        return settings.model_copy(update={"username": "nobody", "password": SecretStr("wrong")})


@pytest.mark.full
class TestIcebergInAnObjectStore(TestIceberg):
    """With its files in a bucket."""

    @pytest.fixture
    def bucket(self, objects: ObjectStore) -> str:
        return objects.bucket()

    @pytest.fixture
    def settings(self, objects: ObjectStore, bucket: str, tmp_path: Path) -> Iceberg:
        return Iceberg(
            catalog=f"sqlite:///{tmp_path}/catalog.db",
            table="shop.messages",
            warehouse=f"s3://{bucket}/lake",
            properties=objects.properties,
        )

    @pytest.fixture
    def unavailable(self, objects: ObjectStore, bucket: str) -> WhileUnavailable:
        return lambda: objects.down(bucket)

    @pytest.fixture
    def refused(self, settings: Iceberg, objects: ObjectStore) -> Iceberg:
        return settings.model_copy(update={"warehouse": f"s3://{objects.bucket('readonly')}/lake"})
