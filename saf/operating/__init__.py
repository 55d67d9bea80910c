"""Operating: queries, decisions, set-up and repair by operators.

Status, doctor, dry runs of routers, fleets and the purge are here. `saf.operating.plans` sets
brokers up from a file, and `saf.operating.repair` has the repairs.
"""
