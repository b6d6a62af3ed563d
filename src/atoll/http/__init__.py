"""Owns HTTP/1.1 over one port: a listener and a client. Does not know the routes.

Start reading at `listener.Listener`, then `server`; for the other side at
`client.HttpClient`.
"""

from atoll.http.client import BUSY, Download, HttpClient, HttpReply, at_most, download
from atoll.http.connection import ListenerLimits, origin_of
from atoll.http.handshake import HandshakeFault
from atoll.http.listener import Listener, ListenerCounts
from atoll.http.registry import ShedReason
from atoll.http.request import Request, RequestBody, ranged
from atoll.http.response import (
    DeferredResponse,
    FilePart,
    Problem,
    Response,
    as_json,
    as_problem,
)

__all__ = [
    "BUSY",
    "DeferredResponse",
    "Download",
    "FilePart",
    "HandshakeFault",
    "HttpClient",
    "HttpReply",
    "Listener",
    "ListenerCounts",
    "ListenerLimits",
    "Problem",
    "Request",
    "RequestBody",
    "Response",
    "ShedReason",
    "as_json",
    "as_problem",
    "at_most",
    "download",
    "origin_of",
    "ranged",
]
