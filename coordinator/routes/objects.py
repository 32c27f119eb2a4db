"""Objects by hash."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from coordinator.edge import problem_response
from coordinator.routes.common import Desk
from coordinator.streams import in_pieces
from protocol.api import E_RANGE
from protocol.errors import E_USAGE, PeerFault
from protocol.store import missing

router = APIRouter(prefix="/v1", tags=["objects"])

#: How long a presigned address of the store is valid, in seconds.
PRESIGNED_S: Final = 600
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@router.get("/objects/{sha256}", response_class=Response, responses={206: {}, 307: {}, 404: {}, 416: {}})
def get_object(request: Request, desk: Desk, sha256: str) -> Response:
    """The bytes of an object, or a redirect to the store that holds it; ranges are served."""
    presigned = desk.store.presign_get(sha256, PRESIGNED_S)
    if presigned is not None:
        return RedirectResponse(presigned.url, status_code=307)
    size = desk.shelf.size(sha256)
    headers = {"ETag": f'"{sha256}"', "Cache-Control": "public, immutable, max-age=31536000", "Accept-Ranges": "bytes"}
    read = partial(desk.shelf.read, sha256)
    wanted = request.headers.get("range")
    if wanted is None:
        return in_pieces(read, 0, size, headers=headers)
    span = byte_range(wanted, size)
    if span is None:
        fault = PeerFault(
            E_RANGE, "the range lies outside the object", expected=f"within {size} bytes", got=wanted[:80]
        )
        return problem_response(fault, {"Content-Range": f"bytes */{size}"})
    first, last = span
    headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    return in_pieces(read, first, last + 1, status_code=206, headers=headers)


@router.get("/skips/{name}", response_class=Response, responses={404: {}})
def get_skips(desk: Desk, name: str) -> Response:
    """Merged diffs that lead to a version, as relays announced them; nothing vouches for them."""
    data = desk.store.announced(name)
    if data is None:
        raise missing(name)
    return Response(data, media_type="application/json", headers={"Cache-Control": "no-cache"})


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """First and last byte of a single ``Range`` of ``size`` bytes; None when it lies outside.

    Raises:
        PeerFault: ``E_USAGE`` for anything but one range of bytes.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] == match[2] == "":
        raise PeerFault(E_USAGE, "unsupported Range", expected="bytes=FIRST-LAST", got=header[:80])
    if match[1] == "":
        first, last = max(0, size - int(match[2])), size - 1
    else:
        first, last = int(match[1]), min(int(match[2]) if match[2] else size - 1, size - 1)
    return (first, last) if first <= last else None
