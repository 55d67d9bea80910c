"""Repair: find and report what was lost or set back, and repair it.

This package compares a source with its destinations, and contains the repairs that an operator runs
afterwards. Set-backs are noticed chunk by chunk in `saf.destinations.marks`.
"""
