"""saf as a Django app: its schema, worker, tasks and admin in a Django project.

    INSTALLED_APPS = [..., "saf.django"]

- *Schema*: ``manage.py migrate`` brings the schema saf of the database to this library's revision,
  before the project's own migrations run; so do the test runner and pytest-django
  (`saf.django.schema`). ``manage.py flush``, and with it a ``TransactionTestCase``, also empties
  saf's messages.
- *Sending*: ``outbox.send(connection, …)`` inside ``transaction.atomic()``.
- *Receiving*: ``saf.Worker(connection, "billing")``, and ``manage.py saf_worker module:worker``.
  Handlers use the ORM in the delivery's transaction.
- *Tasks*: ``saf.django.tasks.Backend`` is a backend of ``django.tasks``; ``manage.py saf_tasks``
  runs the tasks (`saf.django.tasks`).
- *Admin*: outbox, inbox, parked messages and dead letters, to look at (`saf.django.admin`).

A database router decides, as for any app, in which databases this happens: it is asked for the app
``saf``. Databases other than PostgreSQL are left alone.

It needs Django 5.2 or later, with psycopg 3. docs/django.md has examples.
"""
