"""The demo: an example application, and the proof that nothing went wrong on the way.

`saf demo` runs it. Applications to read and to copy from are in the project's folder examples/.
"""
