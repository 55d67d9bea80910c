"""Addresses of destinations: what no resolver would take is refused where it stands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from saf.destinations import addresses, https, nats, redis

PARSERS: dict[str, Callable[[str], object]] = {
    "amqp": partial(addresses.parse, ports={"amqp": 5672}, secure="amqps", named="server"),
    "https": https.parse,
    "nats": nats.parse,
    "redis": redis.parse,
}


@pytest.mark.parametrize("host", ["nats..example.com", ".example.com", f"{'x' * 64}.example.com"])
@pytest.mark.parametrize("scheme", PARSERS)
def test_what_cannot_be_the_name_of_a_host_is_refused(scheme: str, host: str) -> None:
    PARSERS[scheme](f"{scheme}://one.example.com")
    with pytest.raises(ValueError, match="cannot be the name of a host"):
        PARSERS[scheme](f"{scheme}://{host}")
