"""Settings of the project; those of saf are `saf.django`, TASKS and SAF."""

import os

SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only for trying this example")
DEBUG = True
ROOT_URLCONF = "shop.urls"
STATIC_URL = "static/"

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": os.environ["SHOP_DB"],
        "HOST": os.environ.get("SHOP_HOST", ""),
        "PORT": os.environ.get("SHOP_PORT", ""),
        "USER": os.environ.get("SHOP_USER", ""),
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "saf.django",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

TASKS = {"default": {"BACKEND": "saf.django.tasks.Backend"}}
SAF = {"bodies": True, "redact_headers": ["authorization"]}
