"""Repair: what was lost or set back is found, named, and mended.

Here belongs what compares a source with its destinations, and what an operator runs afterwards.
What notices a set-back chunk by chunk is in `saf.destinations.marks`.
"""
