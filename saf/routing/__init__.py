"""Routing: where a message goes, and what was decided for good.

Routes, topics and routers are kept, frozen and explained here, and so are the answers that a key or
a router keeps. Nothing here moves a message: the engine does that.
"""
