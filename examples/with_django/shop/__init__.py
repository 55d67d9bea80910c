"""A Django project that places orders, and writes their invoices and labels.

    pip install 'django>=6.0'                             # or django-tasks with Django 5.2
    export SHOP_DB=shop SHOP_HOST=localhost SHOP_USER=me
    python manage.py migrate                              # brings the schema saf, too
    python manage.py test
    python manage.py shell -c "from shop.models import place; place('A-1', 90)"
    python manage.py saf_tasks --drain                    # prints the label
    saf forward                                           # with a saf.toml: to the service billing
    python manage.py saf_worker shop.consumers:worker --drain

The invoices may be written in another project: then that project has `consumers.py`, and its
database the service billing. docs/django.md explains all parts.
"""
