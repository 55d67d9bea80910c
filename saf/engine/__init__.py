"""The engine: reads, routes, delivers, marks and sets aside one item of work of one source.

The engine runs in any process and does not know Spark, leases or cycles: it takes an item of work
and returns receipts. `saf.forwarding` chooses the items and the runner.
"""
