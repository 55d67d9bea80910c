"""Create the tables, and the service that lives here."""

from typing import Any

from django.db import migrations, models

import saf


def create_service(_: Any, schema_editor: Any) -> None:
    """Create the service billing, on psycopg's connection."""
    saf.create_service(schema_editor.connection.connection, "billing")


class Migration(migrations.Migration):
    """The first migration. `migrate` has brought the schema saf before."""

    initial = True
    operations = (
        migrations.CreateModel(
            name="Order",
            fields=[
                ("number", models.TextField(primary_key=True, serialize=False)),
                ("total", models.IntegerField()),
            ],
        ),
        migrations.CreateModel(
            name="Invoice",
            fields=[
                ("order", models.TextField(primary_key=True, serialize=False)),
                ("total", models.IntegerField()),
            ],
        ),
        migrations.RunPython(create_service, migrations.RunPython.noop),
    )
