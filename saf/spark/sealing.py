"""Seals: passwords inside plans of Spark Connect, encrypted.

A server may write whole plans to its log, with their rows and functions, e.g. plans of executions
that a session abandoned. So values that contain a password are encrypted there, and the key
travels separately: in a file of the session that only its tasks read.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cryptography.fernet import Fernet

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession


@dataclass(frozen=True)
class Seal:
    """The key of one session, and the name of its file in the session."""

    name: str = field(default_factory=lambda: f"saf-{uuid4()}.key")
    key: bytes = field(default_factory=Fernet.generate_key, repr=False)

    def hand_to(self, session: SparkSession) -> None:
        """Give the key to the tasks of a session."""
        with TemporaryDirectory() as folder:  # private to this user
            file = Path(folder) / self.name
            file.write_bytes(self.key)
            session.addArtifact(str(file), file=True)

    def closed(self, value: Any) -> bytes:
        """Return a value as encrypted bytes."""
        return Fernet(self.key).encrypt(pickle.dumps(value))


def opened(name: str, sealed: bytes) -> Any:
    """Decrypt a value in a task of the session; ``name`` is that of the file with the key."""
    from pyspark import SparkFiles

    key = Path(SparkFiles.get(name)).read_bytes()
    return pickle.loads(Fernet(key).decrypt(sealed))  # noqa: S301 - our own bytes  # nosec B301
