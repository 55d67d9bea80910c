"""The engine: one item of work of one source, read, routed, delivered, marked, set aside.

It runs in any process and knows nothing of Spark, of leases or of cycles: it takes an item of work
and gives receipts. Which items there are, and who runs them, is `saf.forwarding`'s.
"""
