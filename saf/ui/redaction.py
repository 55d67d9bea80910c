"""Redaction: hides values in headers and bodies from all roles.

The values that ``redact_paths`` name are hidden in JSON. So if paths are set, a body that cannot be
parsed as JSON is shown only if its content type is something else: a part of a JSON document, such
as a fragment of a large body, may contain the same secrets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from saf.config import Ui
from saf.errors import HIDDEN, ConfigurationError, MissingExtra, masked
from saf.message import CONTENT_TYPE, FRAGMENT, WHOLE
from saf.operating.wording import shown

QUOTED = re.compile(r"(DETAIL: ).*?(?=$|(?: (?:CONTEXT|HINT|SQLSTATE): [^:]*)+$)", re.S)
"""Part of a database error that quotes a row, with headers and body; hidden completely here."""
MOST_BYTES = 64 * 1024
"""Most characters of a body to show."""
LARGEST_BYTES = 1024 * 1024
"""Largest body to show a part of, because hiding values needs a complete parse."""
STRUCTURE = re.compile(r"[{}\[\]]")
"""Signs of JSON inside a JSON string."""
JSON = "json"
"""Part of the name of each content type that contains JSON, such as application/x-ndjson."""


class Redaction:
    """The rules of ``[ui]``.

    Raises:
        ConfigurationError: a JSON path is invalid.
        MissingExtra: JSON paths need a package that is not installed.
    """

    def __init__(self, ui: Ui) -> None:
        self._names = [pattern.lower() for pattern in ui.redact_headers]
        self._paths = []
        if ui.redact_paths:
            jsonpath = _jsonpath()
        for path in ui.redact_paths:
            try:
                self._paths.append(jsonpath.compile(path))
            except jsonpath.JSONPathError as error:
                reason = str(error).splitlines()[0]
                raise ConfigurationError(
                    f"ui.redact_paths: {path!r} is not a JSON path ({reason}); expected such as "
                    "$.card.number or $..password"
                ) from None

    def headers(self, text: str | None) -> Mapping[str, str]:
        """Return headers, given as JSON text, by name, with hidden values replaced."""
        if text is None:
            return {}
        try:
            known = json.loads(text)
        except (ValueError, RecursionError):
            return {"(headers)": HIDDEN}  # unreadable headers cannot be redacted
        if not isinstance(known, dict):
            return {"(headers)": HIDDEN}
        return {
            shown(name): HIDDEN if self._is_hidden(name) else shown(_text(value))
            for name, value in known.items()
        }

    def body(self, body: bytes, headers: str | None) -> str:
        """Return a body for display: indented JSON, text, or its size.

        Args:
            body: the message's body.
            headers: its headers, as JSON text; None if it has none, or they are unknown.
        """
        try:
            text = body.decode("utf-8-sig")  # a BOM is not part of the JSON after it
        except UnicodeDecodeError:
            return f"{len(body):,} bytes, which are not UTF-8 text"
        try:
            found = json.loads(text)
        except RecursionError:
            return _too_deep(body)
        except ValueError:
            if self._paths and not _is_something_else(headers):
                return _unknown(body)
            return _some(shown(text, lines=True))
        if self._paths and isinstance(found, str) and STRUCTURE.search(found):
            return _unknown(body)  # no path reaches into JSON that was encoded twice
        return self._json(found) or _too_deep(body)

    def _json(self, document: Any) -> str:
        """Return a document for display; empty if it is nested too deeply."""
        try:
            for path in self._paths:
                for match in path.finditer(document):
                    document = _without(document, match.parts)
            return _some(shown(json.dumps(document, indent=2, ensure_ascii=False), lines=True))
        except RecursionError:
            return ""

    def _is_hidden(self, name: str) -> bool:
        return any(fnmatchcase(name.lower(), pattern) for pattern in self._names)


def _jsonpath() -> Any:
    try:
        import jsonpath
    except ModuleNotFoundError:
        raise MissingExtra("ui", "hiding values by redact_paths") from None
    return jsonpath


def _unknown(body: bytes) -> str:
    return f"{len(body):,} bytes that may be a part of some JSON: not shown"


def _without(document: Any, parts: Sequence[Any]) -> Any:
    """Return a document with one value hidden."""
    if not parts:
        return HIDDEN
    inner = document
    for part in parts[:-1]:
        try:
            inner = inner[part]
        except (KeyError, IndexError, TypeError):
            return document  # another path has hidden it
    if isinstance(inner, dict | list):
        inner[parts[-1]] = HIDDEN
    return document


def error(text: object) -> str:
    """Return the text of an error, without quoted data of a message."""
    cleaned = shown(masked("" if text is None else str(text)), lines=True)
    return QUOTED.sub(rf"\1{HIDDEN}", cleaned)


def _is_something_else(headers: str | None) -> bool:
    """Return whether headers describe the body as complete, and not JSON.

    >>> _is_something_else('{"Content-Type": "text/csv"}')
    True
    >>> _is_something_else('{"content-type": "application/problem+JSON"}'), _is_something_else(None)
    (False, False)
    >>> _is_something_else('{"content-type": "text/csv", "saf-fragment": 2}')
    False
    """
    try:
        known = json.loads(headers or "{}")
    except (ValueError, RecursionError):
        return False
    if not isinstance(known, dict) or FRAGMENT in known or WHOLE in known:
        return False
    types = [str(value).lower() for name, value in known.items() if name.lower() == CONTENT_TYPE]
    return bool(types) and not any(JSON in type_ for type_ in types)


def _too_deep(body: bytes) -> str:
    return f"{len(body):,} bytes of JSON, nested too deeply to be shown"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _some(text: str) -> str:
    if len(text) <= MOST_BYTES:
        return text
    return f"{text[:MOST_BYTES]}\n… and {len(text) - MOST_BYTES:,} characters more"
