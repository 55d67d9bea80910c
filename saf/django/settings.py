"""The setting SAF of a Django project: what the admin shows of messages.

    SAF = {"bodies": True, "redact_headers": ["*-token"], "redact_paths": ["$..iban"]}

The names, their meaning and their defaults are those of ``[ui]`` in a saf.toml: see docs/ui.md.
"""

from __future__ import annotations

from difflib import get_close_matches

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from saf.config import Ui, with_options
from saf.errors import ConfigurationError
from saf.ui.redaction import Redaction

NAMES = ("bodies", "redact_headers", "redact_paths")


def shown_parts() -> tuple[bool, Redaction]:
    """Return whether bodies are shown, and the redaction of headers and bodies.

    Raises:
        ImproperlyConfigured: the setting has an unknown name or a wrong value.
        MissingExtra: JSON paths need a package that is not installed.
    """
    given = getattr(settings, "SAF", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"SAF: expected a dict, got {given!r}")
    for name in given:
        if name not in NAMES:
            near = get_close_matches(str(name), NAMES, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ImproperlyConfigured(f"SAF[{name!r}]: expected one of {', '.join(NAMES)}{hint}")
    try:
        ui = with_options(Ui(), **given)
        return ui.bodies, Redaction(ui)
    except ConfigurationError as error:
        raise ImproperlyConfigured(f"SAF: {error}") from None
