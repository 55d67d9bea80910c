"""A module for each command of manage.py."""
