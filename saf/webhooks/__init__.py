"""Webhooks: messages that come and go by HTTP, signed as Standard Webhooks has it.

    saf.webhooks.verify(request.headers, body, secrets)

is for whoever receives what `saf dispatch` sends, or any other sender of signed webhooks. And

    app = saf.webhooks.inbox(engine, "billing", secrets=secrets)

is an ASGI application that stores them in an inbox, each once. And

    app = saf.webhooks.broker(dsn, secrets=secrets)

is one that the forwarders of other installations deliver to, as a destination of kind ``https``.
"""

from saf.signing.webhook import verify
from saf.webhooks.deliveries import broker
from saf.webhooks.receiver import inbox

__all__ = ["broker", "inbox", "verify"]
