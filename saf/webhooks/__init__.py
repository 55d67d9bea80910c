"""Webhooks: messages that come and go by HTTP, signed as Standard Webhooks has it.

    saf.webhooks.verify(request.headers, body, secrets)

is for whoever receives what `saf dispatch` sends, or any other sender of signed webhooks. And

    app = saf.webhooks.inbox(engine, "billing", secrets=secrets)

is an ASGI application that stores them in an inbox, each once.
"""

from saf.webhooks.receiver import inbox
from saf.webhooks.signature import verify

__all__ = ["inbox", "verify"]
