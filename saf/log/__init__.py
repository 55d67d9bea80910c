"""The log: a sharded, append-only table that subscriptions read by snapshot cursors.

This package has what all readers of an outbox or an inbox share: cursors and their batches, shards
and their owners, the ring that stores the rows, the columns that are read. What a reader does with
messages belongs to the reader.
"""
