"""Names that only the containers of a loopback cloud know, all of this machine.

A cloud gives its containers names of each other, which nobody outside of it resolves.
"""

from __future__ import annotations

from pathlib import Path

RESOLVER = """
import pathlib
import socket

_known = pathlib.Path(__file__).with_name("names")
_usual = socket.getaddrinfo


def _inside(host, *arguments, **named):
    is_known = _known.exists() and host in _known.read_text().split()
    return _usual("127.0.0.1" if is_known else host, *arguments, **named)


socket.getaddrinfo = _inside
"""


class HostNames:
    """What a cloud's own resolver knows."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "sitecustomize.py").write_text(RESOLVER)

    def add(self, name: str) -> None:
        with (self._directory / "names").open("a") as file:
            file.write(f"{name}\n")

    @property
    def around(self) -> dict[str, str]:
        """What a container's environment has, so that its Python asks here."""
        return {"PYTHONPATH": str(self._directory)}
