"""The demo: an example application, and the proof that nothing went wrong on the way.

Read `saf.demo.flights` to see how an application sends. `saf demo` runs it.
"""
