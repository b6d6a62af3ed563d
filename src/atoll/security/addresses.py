"""The addresses of coordinators: hosts, ports, and the URL of a run.

Rule 1: an address has one spelling, so that stored credentials are found again.
Rule 2: plain HTTP never leaves the machine: a token would be sent unencrypted.
Rule 3: `localhost` is not replaced by 127.0.0.1: it may be ::1, where another user of
the machine may listen.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from atoll.errors import UsageError

MAX_HOST_BYTES = 253
MAX_URL_BYTES = 512
MAX_PORT = 65535

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?", re.ASCII)
_DEFAULT_PORT = {"https": 443, "http": 80}


@dataclass(frozen=True)
class Address:
    """A host, in its one spelling, and a port."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port <= MAX_PORT:
            raise UsageError(f"Port {self.port} is not within 1 to {MAX_PORT}.")
        object.__setattr__(self, "host", spelt(self.host))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class RunUrl:
    """The URL of a coordinator; its text is its one spelling."""

    scheme: str
    address: Address

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}"

    @property
    def has_tls(self) -> bool:
        return self.scheme == "https"


def spelt(host: str) -> str:
    """Return a host name or IP address in its one spelling, without brackets.

    Raises:
        UsageError: it is neither.
    """
    if re.fullmatch(r"\[[^\[\]]*:[^\[\]]*\]", host):
        host = host[1:-1]
    if ip := ip_of(host):
        return str(ip)
    lowered = host.lower()
    if len(host) > MAX_HOST_BYTES or not _HOST_NAME.fullmatch(lowered):
        raise UsageError(
            f"{host[:64]!r} is no host: give a name of letters, digits, '-' and '.', "
            "or an IP address."
        )
    return lowered.removesuffix(".")


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an IP address, if it is one without a zone."""
    try:
        return ipaddress.ip_address(host) if "%" not in host else None
    except ValueError:
        return None


def network_of(address: str) -> str:
    """Return the network that one caller owns: an IPv4 address, or the /64 of an IPv6.

    The holder of one IPv6 address usually has all of its /64. All texts that are not
    addresses count as one caller.
    """
    ip = ip_of(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip) if ip else ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`; empty: every interface."""
    if host.lower() == "localhost":
        return True
    ip = ip_of(host.removeprefix("[").removesuffix("]"))
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    return ip is not None and ip.is_loopback


def parse_address(text: str, *, usual_port: int | None = None) -> Address:
    """Return `host:port`, with brackets around an IPv6 address.

    Raises:
        UsageError: it is malformed, or has no port and there is no default.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?", text)
    if not match or re.search(r"[^\x21-\x7e]", text):
        raise UsageError("The address is not written as host:port. Correct it.")
    host, port = match.groups()
    if port is None and usual_port is None:
        raise UsageError(f"{host[:64]!r} has no port. Write {host[:64]}:PORT.")
    return Address(host, int(port) if port else usual_port or 0)


def parse_run_url(text: str) -> RunUrl:
    """Return `https://host:port`, or `http://` of this machine, in its one spelling.

    Raises:
        UsageError: it is not such a URL. The message repeats no part of it that may
            be a secret.
    """
    if len(text) > MAX_URL_BYTES or re.search(r"[^\x21-\x7e]", text):
        raise UsageError(
            f"A run's URL has at most {MAX_URL_BYTES} characters of ASCII and no "
            "blanks. Write https://host:port."
        )
    scheme, mark, rest = text.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in _DEFAULT_PORT:
        raise UsageError("A run's URL starts with https:// (on loopback also http://).")
    address = parse_address(_bare(rest), usual_port=_DEFAULT_PORT[scheme])
    if scheme == "http" and not is_loopback(address.host):
        raise UsageError(
            f"http://{address} would send the token in the open. Write "
            f"https://{address}, and start the coordinator with TLS."
        )
    return RunUrl(scheme, address)


def _bare(rest: str) -> str:
    """Return the host and port after a scheme; nothing else may follow."""
    address = rest.removesuffix("/")
    if "@" in address:
        raise UsageError(
            "A run's URL holds no name or password. Remove the part before '@'; "
            "the token is read from a file."
        )
    if re.search(r"[/?#,]", address):
        raise UsageError(
            "A run's URL ends after its port: https://host:port. An invite, which "
            "is longer, is for `atoll join`."
        )
    return address
