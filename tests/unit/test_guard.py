"""The guard lets nothing through that is inside of somebody's network, however it is written."""

from __future__ import annotations

import ipaddress

import pytest

from saf.receiving.dispatch.transport import address_check, is_public

PUBLIC = (
    "93.184.216.34", "8.8.8.8", "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255",
    "100.128.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.167.255.255", "198.17.255.255",
    "198.20.0.0", "223.255.255.255", "168.63.129.17", "2606:2800:220:1::1", "2001:200::1",
    "2001:4860:4860::8888", "2620:4f:8000::1", "2a00::1", "3ffe:ffff::1",
    "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1",
)  # fmt: skip
# each a line of IANA's registries, or of a provider's documentation
NOT_PUBLIC = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.170/32", "192.0.0.192/32",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
    "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32", "168.63.129.16/32",
    "::1/128", "::/128", "::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "200::/7",
    "2001::/23", "2001::/32", "2001:2::/48", "2001:10::/28", "2001:20::/28", "2001:db8::/32",
    "3fff::/20", "4000::/3", "5f00::/16", "fc00::/7", "fd00:ec2::254/128", "fe80::/10", "fec0::/10",
    "ff00::/8",
)  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_on_the_public_internet_is_called(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("network", NOT_PUBLIC)
def test_a_special_purpose_address_is_not_called_whatever_version_python_has(network: str) -> None:
    there = ipaddress.ip_network(network)
    assert [is_public(str(one)) for one in (there[0], there[-1])] == [False, False]


@pytest.mark.parametrize("inside", ["10.0.0.1", "127.0.0.1", "169.254.169.254", "192.0.0.192"])
def test_an_address_of_ipv6_that_stands_for_one_inside_is_not_called(inside: str) -> None:
    number = int(ipaddress.IPv4Address(inside))
    high, low = number >> 16, number & 0xFFFF
    for written in (
        f"::ffff:{inside}", f"::{inside}", f"64:ff9b::{inside}", f"2002:{high:x}:{low:x}::1",
        f"64:ff9b:1::{inside}",
    ):  # fmt: skip
        assert not is_public(written), written


def test_a_network_that_is_named_is_called_nevertheless() -> None:
    check = address_check(["192.0.0.192/32", "fec0::/10"])
    for address in ("192.0.0.192", "fec0::1", "fec0::1%eth0", "8.8.8.8"):
        check(address)
    with pytest.raises(PermissionError, match="not on the public internet"):
        check("192.0.0.193")
