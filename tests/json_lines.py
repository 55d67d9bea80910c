"""What is in a folder of JSON lines, for tests."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from saf.columns import COLUMNS, MESSAGE

UUIDS = {column.name for column in MESSAGE if column.type == "uuid"}
MOMENTS = {column.name for column in MESSAGE if column.type == "timestamptz"}


def lines(folder: Path) -> list[Mapping[str, Any]]:
    """All messages, by the names of their files and the lines in them."""
    found: list[Mapping[str, Any]] = []
    for file in sorted(folder.glob("*/*.jsonl")):
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
            said = json.loads(line)
            found.append({name: _value(name, said) for name in COLUMNS})
    return found


def _value(name: str, said: Mapping[str, Any]) -> object:
    if name == "body":
        return said["body"].encode() if "body" in said else b64decode(said["body_base64"])
    if name not in said:
        return None
    if name == "headers":
        return json.dumps(said[name])
    if name in UUIDS:
        return UUID(said[name])
    return datetime.fromisoformat(said[name]) if name in MOMENTS else said[name]
