"""Plans: a file defines what brokers should have; it is compared with them and applied.

`tables` defines what a plan may contain; `file` reads and writes plans; `difference` compares and
applies.
"""
