"""Receiving: the consumer's side, which reads an inbox in order and in its own transaction.

This package contains deliveries, workers and processors. `saf.dialogs` adds conversations to
received messages by installing a hook; nothing here imports `saf.dialogs`.
"""
