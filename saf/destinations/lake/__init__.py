"""What all kinds of a lakehouse share: a row's columns, settings, storing in commits, reading back.

A kind adds how its format commits, and where its marks are: `saf.destinations.delta`,
`saf.destinations.iceberg`.
"""
