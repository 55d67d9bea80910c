"""Routing: where a message goes, and which decisions are kept.

Routes, topics and routers are stored, frozen and explained here, with the choices of keys and the
resolutions of routers. Nothing here moves a message; the engine does.
"""
