"""Sending in other ways: on connections under asyncio, and from the tasks of a Spark job."""
