"""Routing: where a message goes, and what was decided for good.

Here belong routes, topics and routers as they are kept, frozen and explained, and the answers that
a key or a router keeps. Here is nothing that moves a message: that is the engine's.
"""
