"""Forwarding: the driver that finds work at all sources, has it run, and settles what came of it.

Here belongs what holds leases and opens and closes batches. Messages never pass through here; what
runs the work is a `saf.forwarding.runner`.
"""
