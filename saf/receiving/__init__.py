"""Receiving: a consumer's side, which reads an inbox in order and in its own transaction.

Deliveries, workers and processors are here. `saf.dialogs` adds conversations to received messages
by installing a hook; nothing here imports it.
"""
