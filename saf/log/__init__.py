"""The log: a sharded, append-only table that subscriptions read by snapshot cursors.

What all readers of an outbox or an inbox share is here: cursors and their batches, shards and their
owners, the ring that holds the rows, the columns that are read. What a reader does with messages
belongs to the reader.
"""
