"""Operating: what a person asks a broker, and tells it to clean up.

Status, doctor, dry runs of routers and the purge are here. Repairs are in `saf.repair`.
"""
