"""Tasks of the project: ``manage.py saf_tasks`` runs them."""

from saf.django.tasks import task  # that of django.tasks; before Django 6, of django_tasks

from .models import Order


@task
def print_label(number: str) -> str:
    """Print the label of an order."""
    order = Order.objects.get(number=number)
    label = f"order {order.number}: {order.total}"
    print(label)
    return label
