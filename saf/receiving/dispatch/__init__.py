"""Dispatch: the last mile to services that have only a URL.

A dispatcher sends the messages of a subscription to an endpoint, one at a time for each key; the
endpoint's answer is the acknowledgement. A dispatcher is a reader of the inbox like any other: it
reads by cursors, as a member that owns shards, and sets messages aside in the lanes that receivers
use.
"""
