"""Operating: what a person asks a broker and tells it to clean up.

Here belong status, doctor, trials of routers and the purge. What repairs is in `saf.repair`.
"""
