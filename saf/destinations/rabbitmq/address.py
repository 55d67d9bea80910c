"""Addresses: where a RabbitMQ server takes messages for queues, as a URL without its login.

amqp://host:5672/vhost         one server; without a path, the virtual host ``/``
amqp://host,host:5673          a cluster: whichever answers first
amqps://host                   the same, with TLS
"""

from __future__ import annotations

from saf.destinations.rabbitmq_stream import address
from saf.destinations.rabbitmq_stream.address import Address

PORTS = {"amqp": 5672, "amqps": 5671}
"""The port by default, by the scheme."""


def parse(text: str) -> Address:
    """Return an address.

    >>> parse("amqps://n1,[::1]:7000/a%2Fb")
    Address(hosts=(('n1', 5671), ('::1', 7000)), virtual_host='a/b', tls=True)

    Raises:
        ValueError: it is none.
    """
    return address.parse(text, PORTS, "server, such as amqp://host:5672 or amqps://host:5671")
