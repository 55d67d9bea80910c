"""Message types as classes: what `saf.event` marks, decodes and describes as a JSON Schema."""
