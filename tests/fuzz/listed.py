"""All targets, by name."""

from __future__ import annotations

from tests.fuzz import dialogs, messages, settings, wire

TARGETS = {one.name: one for part in (messages, dialogs, wire, settings) for one in part.TARGETS}
