"""Sending: bodies and headers as they are stored, and connections under asyncio."""
