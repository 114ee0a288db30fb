"""Middleware of all requests: access, size and rate limits, headers, the log, and metrics for Prometheus."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
from fastapi.responses import JSONResponse

from empax.core.config import check_numbers
from empax.serving.web.openai import ApiError

LOG = logging.getLogger("empax.serve")
MOST_BYTES = 1 << 18
FAILED = "the server failed; its log says where."

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
      token: bearer token of requests; empty = none.
      places: maximum number of replies that may wait for the model.
      per_minute: maximum requests per minute from one address; 0 = unlimited.
      hosts: host names by which the server may be called; empty = any.
      log_texts: whether to log messages and replies.
      votes: the folder for votes on two systems.
      safety: the page's text on the safety layer.
      watched_replies: number of contexts that a watched run answers after each checkpoint.
    """

    token: str = ""
    places: int = 64
    per_minute: int = 120
    hosts: tuple[str, ...] = ()
    log_texts: bool = False
    votes: Path = Path("votes")
    safety: str = ""
    watched_replies: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, "places", least=1)
        check_numbers(self, "per_minute", "watched_replies", least=0)


class Numbers:
    """The metrics of /metrics."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = prometheus.Counter("empax_requests", "Answered requests.", ["path", "status"], **own)
        self.seconds = prometheus.Histogram("empax_request_seconds", "Until the answer is sent.", ["path"], **own)
        self.tokens = prometheus.Counter("empax_tokens", "Tokens read and written.", ["kind"], **own)
        self.waiting = prometheus.Gauge("empax_waiting", "Replies that wait for the model.", **own)
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self.rows = prometheus.Histogram("empax_batch_rows", "Replies written at once.", buckets=sizes, **own)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's format."""
        return prometheus.generate_latest(self.registry)


class Rates:
    """Rate limit of requests per minute from one address; a burst has the same limit.

    Only POST requests and requests with a wrong token count.
    """

    def __init__(self, per_minute: int):
        self.per_minute, self._seen = per_minute, dict[str, tuple[float, float]]()

    def check(self, address: str) -> None:
        """Raises ApiError if the address exceeds the limit."""
        if not self.per_minute:
            return
        now, speed = time.monotonic(), self.per_minute / 60
        if len(self._seen) > 10_000:  # drop addresses without a request for a minute
            self._seen = {name: (left, at) for name, (left, at) in self._seen.items() if now - at < 60}
        left, at = self._seen.get(address, (float(self.per_minute), now))
        left = min(self.per_minute, left + (now - at) * speed)
        if left < 1:
            message = f"{self.per_minute} requests a minute are allowed."
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=math.ceil((1 - left) / speed))
        self._seen[address] = (left - 1, now)


class Gate:
    """ASGI middleware; `open_paths` need no token."""

    def __init__(
        self, app: Any, *, settings: ServerSettings, numbers: Numbers, paths: Iterable[str], open_paths: Iterable[str]
    ):
        self._app, self._settings, self._rates = app, settings, Rates(settings.per_minute)
        self._numbers, self._paths, self._open = numbers, frozenset(paths), frozenset(open_paths)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, read = time.monotonic(), 0, 0

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in _HEADERS.items())]
            await send(message)

        async def receiving() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MOST_BYTES:
                raise _too_long()
            return message

        try:
            self._check(scope)
            await self._app(scope, receiving, sending)
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, sending)
        except Exception as error:
            LOG.error("%s in %s", type(error).__name__, place_of(error))
            if not status:
                body = ApiError(500, FAILED).body
                await JSONResponse(body, 500)(scope, receive, sending)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            seconds = time.monotonic() - begin
            self._numbers.requests.labels(path, str(status)).inc()
            self._numbers.seconds.labels(path).observe(seconds)
            LOG.info("%s %s %d %.3f s", scope["method"], path, status, seconds)

    def _check(self, scope: Any) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "").rsplit(":", 1)[0] if "]" not in headers.get("host", "") else "localhost"
        if self._settings.hosts and host not in self._settings.hosts:
            raise ApiError(403, "this server answers only to its local name.")  # keeps other sites' pages out
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size) > MOST_BYTES:
            raise _too_long()
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        token = self._settings.token
        may = not token or scope["path"] in self._open or hmac.compare_digest(given, token.encode())
        if scope["method"] == "POST" or not may:  # guessed tokens count
            self._rates.check((scope.get("client") or ("", 0))[0])
        if not may:
            raise ApiError(401, "a token is needed: Authorization: Bearer TOKEN.", code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(415, "the body must be application/json.")


def _too_long() -> ApiError:
    return ApiError(413, f"the body is longer than {MOST_BYTES} bytes.", code="request_too_large")


def place_of(error: BaseException) -> str:
    """Returns the file and line that raised the error; its message may quote a user's text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
