"""Dispatch: the last mile to services that have only a URL.

The messages of a subscription are sent to an endpoint, one at a time for each key, and its answer
is the acknowledgement. A dispatcher is a reader of the inbox like any other: it reads by cursors,
as a member that owns shards, and sets messages aside in the lanes that receivers use.
"""
