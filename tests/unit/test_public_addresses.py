"""The guard: which addresses are on the public internet, and which only look like it."""

from __future__ import annotations

import pytest

from saf.receiving.dispatch.transport import address_check, is_public


@pytest.mark.parametrize("address", ["4000::1", "e000::1", "240.0.0.1", "255.255.255.255"])
def test_an_address_that_is_reserved_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["ff0e::1", "224.0.0.1", "239.255.255.250"])
def test_an_address_of_many_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "2002:0a00:0001::1",  # 10.0.0.1 by 6to4
        "2001:0000:5db8:d822:0:0:f5ff:fffe",  # 10.0.0.1 by Teredo
        "64:ff9b::7f00:1",  # 127.0.0.1 by NAT64
        "::ffff:169.254.169.254",
    ],
)
def test_an_address_that_stands_for_one_inside_is_not_public(address: str) -> None:
    assert not is_public(address)


def test_an_address_that_stands_for_a_public_one_is_public() -> None:
    assert is_public("::ffff:93.184.216.34")


def test_a_network_that_is_allowed_is_reached_and_its_neighbours_are_not() -> None:
    check = address_check(["10.1.0.0/16", "fd00::/8"])
    for address in ("10.1.255.255", "fd12::1%eth0", "93.184.216.34"):
        check(address)
    for address in ("10.2.0.0", "10.0.255.255", "fe80::1"):
        with pytest.raises(PermissionError, match="not on the public internet"):
            check(address)
