"""Forwarding: the driver that finds work at all sources, has it run, and settles the results.

This package holds leases, and opens and closes batches. Messages never pass through it; a
`saf.forwarding.runner` runs the work.
"""
