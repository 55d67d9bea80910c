"""The log: a sharded, append-only table that subscriptions read by snapshot cursors.

Here belongs what every reader of an outbox or an inbox shares: cursors and their batches, shards
and who owns them, the ring that the rows are kept in, the columns that are read. What a reader
does with the messages belongs to the reader.
"""
