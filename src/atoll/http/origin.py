"""The network that a connection comes from, which budgets are counted by."""

from __future__ import annotations

import ipaddress
from typing import Final

PREFIX_BITS: Final = 64
"""One customer usually has a whole IPv6 /64, and may use any address of it."""


def origin_of(host: str) -> str:
    """Return an IPv4 address as it is, and an IPv6 address as its /64 network.

    An IPv4 address that was mapped into IPv6 counts as itself.
    """
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, PREFIX_BITS), strict=False))
