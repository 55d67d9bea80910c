"""Webhooks: messages that come and go by HTTP, signed as Standard Webhooks has it.

    saf.webhooks.verify(request.headers, body, secrets)

is for whoever receives what `saf dispatch` sends, or any other sender of signed webhooks.
"""

from saf.webhooks.signature import verify

__all__ = ["verify"]
