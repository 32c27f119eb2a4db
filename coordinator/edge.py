"""The HTTP edge: bodies with a limit and a deadline, problems instead of tracebacks, request ids, rate limits."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.api import E_WITHHELD, problem_of
from protocol.clock import Clock
from protocol.errors import (
    E_INTERNAL,
    E_NOT_FOUND,
    E_RATE_LIMITED,
    E_SCHEMA,
    E_TOO_LARGE,
    E_UNREACHABLE,
    E_USAGE,
    AssayError,
    LocalFault,
    PeerFault,
    Transient,
)
from protocol.validation import expectation

logger = logging.getLogger(__name__)

PROBLEM_JSON: Final = "application/problem+json"
#: Addresses remembered by the rate limit; the one that was quiet longest is forgotten first.
MAX_ADDRESSES: Final = 10_000
#: Never limited: what a supervisor asks.
_EXEMPT: Final = frozenset({"/healthz", "/readyz"})
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The request's body, refused by its announced length before a byte is read, and never read beyond the limit.

    Raises:
        PeerFault: ``E_TOO_LARGE``.
        Transient: ``E_UNREACHABLE`` when it does not arrive in time.
    """
    parts: list[bytes] = []

    async def take(part: bytes) -> None:
        parts.append(part)

    await receive_body(request, max_bytes, timeout_s, take)
    return b"".join(parts)


async def receive_body(
    request: Request, max_bytes: int, timeout_s: float, take: Callable[[bytes], Awaitable[None]],
    *, bytes_per_s: float | None = None,
) -> None:
    """Hand the request's body on, part by part.

    Args:
        max_bytes: refused by its announced length before a byte is read, and never read beyond.
        timeout_s: time it may take, in seconds.
        bytes_per_s: slowest pace; whatever came at it buys its own time on top.

    Raises:
        PeerFault: ``E_TOO_LARGE``.
        Transient: ``E_UNREACHABLE`` when it does not arrive in time, or not at all.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > max_bytes:
        raise _too_large(max_bytes, announced[:20])
    total, began = 0, anyio.current_time()
    try:
        with anyio.fail_after(timeout_s) as scope:
            async for part in request.stream():
                total += len(part)
                if total > max_bytes:
                    raise _too_large(max_bytes, f"more than {max_bytes}")
                await take(part)
                if bytes_per_s is not None:
                    scope.deadline = began + timeout_s + total / bytes_per_s
    except TimeoutError:
        pace = "" if bytes_per_s is None else f", then {bytes_per_s:g} bytes per second"
        expected, got = f"< {timeout_s:g} s{pace}", f"{total} bytes"
        raise Transient(E_UNREACHABLE, "the request's body did not arrive", expected=expected, got=got) from None
    except ClientDisconnect:
        raise Transient(E_UNREACHABLE, "the sender went away", got=f"{total} bytes") from None


def address_of(scope: Scope) -> str:
    """Whom a request's connection counts as: its IPv4 address, or the network that an IPv6 subscriber has (/64)."""
    client = scope.get("client")
    return network_of(client[0] if client else "")


def network_of(host: str) -> str:
    """``host`` itself; of an IPv6 address the /64 it is in, of one that stands for an IPv4 address the latter."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def problem_response(error: AssayError, extra_headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as ``application/problem+json``."""
    problem = problem_of(error)
    headers = dict(extra_headers or {})
    if problem["status"] in (429, 503):
        headers["Retry-After"] = str(max(1, round(getattr(error, "retry_after_s", 0.0))))
    if problem["status"] == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem, status_code=problem["status"], media_type=PROBLEM_JSON, headers=headers)


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every error in one form."""

    @app.exception_handler(AssayError)
    async def _ours(_request: Request, error: AssayError) -> JSONResponse:
        if isinstance(error, LocalFault) and error.code not in (E_NOT_FOUND, E_WITHHELD):
            logger.warning("local fault", extra={"code": error.code, "detail": str(error)})
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def _bad_parameters(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return problem_response(
            PeerFault(E_SCHEMA, f"{where} does not fit", expected=expectation(first), got=str(first.get("input"))[:80])
        )

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = E_NOT_FOUND if error.status_code == 404 else E_USAGE
        fault = LocalFault(code, str(error.detail), got=f"{request.method} {request.url.path[:200]}")
        problem = problem_of(fault) | {"status": error.status_code}
        return JSONResponse(problem, error.status_code, media_type=PROBLEM_JSON, headers=error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, _error: Exception) -> JSONResponse:
        # The server logs the traceback; the caller learns nothing about our insides.
        return problem_response(LocalFault(E_INTERNAL, "unexpected fault", got=request.scope.get("request_id")))


class RequestIds:
    """Gives each request an id, taken from ``X-Request-Id`` when that is sane, and returns it."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


class RateLimit:
    """A token bucket per address."""

    def __init__(self, app: ASGIApp, clock: Clock, rate_per_s: float, burst: int):
        self._app, self._clock, self._rate, self._burst = app, clock, rate_per_s, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and self._rate > 0 and scope["path"] not in _EXEMPT:
            wait_s = self.take(address_of(scope))
            if wait_s > 0:
                error = Transient(E_RATE_LIMITED, "too many requests", expected=f"<= {self._rate:g} per second")
                error.retry_after_s = wait_s
                await problem_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def take(self, address: str) -> float:
        """Use one request of an address; seconds to wait when it has none left."""
        now = self._clock.monotonic()
        tokens, then = self._buckets.pop(address, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        allowed = tokens >= 1
        self._buckets[address] = (tokens - 1 if allowed else tokens, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self._rate


def _too_large(max_bytes: int, got: str) -> PeerFault:
    return PeerFault(E_TOO_LARGE, "request body too large", expected=f"<= {max_bytes} bytes", got=got)
