"""Repair: find, report and repair losses and set-backs.

This package compares a source with its destinations, and contains the repairs that an operator runs
afterwards. Set-backs are noticed chunk by chunk in `saf.destinations.marks`.
"""
