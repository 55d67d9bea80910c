"""Webhooks: messages sent and received by HTTP, signed with Standard Webhooks.

    saf.webhooks.verify(request.headers, body, secrets)

verifies webhooks from `saf dispatch`, or from any other sender of signed webhooks. And

    app = saf.webhooks.inbox(engine, "billing", secrets=secrets)

is an ASGI application that stores them in an inbox, each once. And

    app = saf.webhooks.broker(dsn, secrets=secrets)

is an application that forwarders of other installations deliver to, as a destination of kind
``https``.
"""

from saf.signing.webhook import verify
from saf.webhooks.deliveries import broker
from saf.webhooks.receiver import inbox

__all__ = ["broker", "inbox", "verify"]
