"""Downloads that resume: one range of a body, as `Range: bytes=a-b` asks for it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from atoll.http.request import Request
from atoll.http.response import OCTETS, Body, Response, cut, length_of

_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def ranged(
    request: Request,
    body: Body,
    *,
    etag: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return 206 with the range asked for, 416 if there is none, else 200 with all.

    What is no single range of bytes counts as not asked, as the standard allows; so
    does a range of another version of the body, by `If-Range` and `etag`.
    """
    total = length_of(body)
    given = {name.lower(): value for name, value in (headers or {}).items()}
    said = {"content-type": OCTETS, "accept-ranges": "bytes", **given}
    if etag is not None:
        said["etag"] = f'"{etag}"'
    wanted = _wanted(request, said.get("etag"))
    if wanted is None:
        return Response(headers=said, body=body)
    first, last = _resolved(wanted, total)
    if first >= last:
        return Response(status=416, headers={"content-range": f"bytes */{total}"})
    said["content-range"] = f"bytes {first}-{last - 1}/{total}"
    return Response(status=206, headers=said, body=cut(body, first, last - first))


def _wanted(request: Request, etag: str | None) -> tuple[str, str] | None:
    found = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if found is None or request.method != "GET":
        return None
    if request.headers.get("if-range", etag) != etag:
        return None
    first, last = found.groups()
    is_backwards = first and last and int(first) > int(last)
    return None if is_backwards or not (first or last) else (first, last)


def _resolved(wanted: tuple[str, str], total: int) -> tuple[int, int]:
    """Return the first byte, and the one after the last; none are left if equal."""
    first, last = wanted
    if not first:
        return max(0, total - int(last)), total
    end = min(int(last) + 1, total) if last else total
    return int(first), end
