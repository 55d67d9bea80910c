"""Forwarding: the driver that finds work at all sources, has it run, and settles what came of it.

What holds leases, and opens and closes batches, is here. Messages never pass through here; a
`saf.forwarding.runner` runs the work.
"""
