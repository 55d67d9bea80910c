"""Migrations of the project."""
