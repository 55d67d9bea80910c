"""The demos that `saf demo` runs: an example application, and the proof of exactly once.

`flights` is the application, `forwarding` the scenario with a plug for each kind of destination in
`kinds`; `lake` and `trade` are scenarios of their own. This package imports `saf`, and `saf` finds
the function `saf_demo.command.command` by its name only. Example applications to copy from are in
the project's folder examples/.
"""
