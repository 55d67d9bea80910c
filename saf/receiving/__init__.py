"""Receiving: a consumer's side, which reads an inbox in order and in its own transaction.

Here belong deliveries, workers and processors. What a conversation adds to a received message is
`saf.dialogs`, which hooks itself in; nothing here imports it.
"""
