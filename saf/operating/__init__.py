"""Operating: questions that operators ask a broker, and cleaning up.

Status, doctor, dry runs of routers and the purge are here. Repairs are in `saf.operating.repair`.
"""
