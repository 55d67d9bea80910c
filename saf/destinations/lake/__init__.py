"""Shared by all kinds of a lakehouse: a row's columns, settings, storing in commits, reading back.

A kind adds how its format commits, and where it keeps marks: `saf.destinations.delta`,
`saf.destinations.iceberg`.
`saf.destinations.iceberg`.
"""
