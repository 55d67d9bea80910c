"""A broker: a database with the schema ``saf``, its creation, its rights and its identity.

This package contains what an owner sets up once: migrations, rights, services, an embedded server.
Messages are handled elsewhere.
"""
