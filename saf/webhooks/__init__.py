"""Webhooks: messages sent and received by HTTP, signed with Standard Webhooks.

`verify` checks the signature of a webhook from `saf dispatch`, or from any other sender:

    saf.webhooks.verify(request.headers, body, secrets)

`inbox` returns an ASGI application that stores signed events in an inbox, each once:

    app = saf.webhooks.inbox(engine, "billing", secrets=secrets)

`broker` returns an ASGI application that forwarders of other installations deliver to, as a
destination of kind ``https``:

    app = saf.webhooks.broker(dsn, secrets=secrets)
"""

from saf.signing.webhook import verify
from saf.webhooks.deliveries import broker
from saf.webhooks.receiver import inbox

__all__ = ["broker", "inbox", "verify"]
