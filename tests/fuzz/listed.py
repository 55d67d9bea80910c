"""All targets, by name."""

from __future__ import annotations

from tests.fuzz import messages, settings, wire

TARGETS = {one.name: one for part in (messages, wire, settings) for one in part.TARGETS}
