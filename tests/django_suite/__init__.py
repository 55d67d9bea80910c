"""Tests that run inside Django's test runners, in a copy of examples/with_django.

`tests/integration/test_django.py` runs them by pytest-django, in a process of its own.
"""
