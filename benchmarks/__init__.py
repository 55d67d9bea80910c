"""Benchmarks: what the project costs, against the physical ceiling, in one run on one machine."""
