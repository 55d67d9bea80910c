"""A broker: a database with the schema ``saf``, made, granted and asked who it is.

Here belongs what an owner sets up once: migrations, rights, services, an embedded server. What
happens to messages belongs elsewhere.
"""
