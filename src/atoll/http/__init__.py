"""Owns HTTP/1.1 over one port: a listener, and a caller. Does not know what is said.

Start reading at `listener.Listener`, then `serving`; for the other side at
`caller.Caller`.
"""

from atoll.http.body import Body
from atoll.http.caller import Caller, Reply
from atoll.http.fetching import Fetching, at_most, fetch
from atoll.http.handshakes import Unfit
from atoll.http.later import Later
from atoll.http.limits import Limits
from atoll.http.listener import Counts, Listener
from atoll.http.origin import origin_of
from atoll.http.problem import Problem
from atoll.http.ranges import ranged
from atoll.http.request import Request
from atoll.http.response import FilePart, FileParts, Response, as_json, as_problem
from atoll.http.shed import Shed
from atoll.http.stream import Stream

__all__ = [
    "Body",
    "Caller",
    "Counts",
    "Fetching",
    "FilePart",
    "FileParts",
    "Later",
    "Limits",
    "Listener",
    "Problem",
    "Reply",
    "Request",
    "Response",
    "Shed",
    "Stream",
    "Unfit",
    "as_json",
    "as_problem",
    "at_most",
    "fetch",
    "origin_of",
    "ranged",
]
