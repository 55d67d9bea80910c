"""The demo: an example application, and the proof that no message went wrong on the way.

`saf demo` runs it. Example applications to copy from are in the project's folder examples/.
"""
