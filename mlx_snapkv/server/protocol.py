"""uvicorn's HTTP protocol with JSON errors, and with support for clients that half-close the connection."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .api_error import ApiError
from .formatter import ResponseFormatter

RESPONSE_START = b"HTTP/1.1 "  # first bytes of every response
# Seconds between the first two bytes that a `ProbingTransport` sends. The interval then doubles with each byte.
PROBE_SECONDS = 0.25


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol with two changes.

    Invalid HTTP requests get an error in OpenAI's format. Clients that close their sending side after a request still
    get their answer.
    """

    def send_400_response(self, msg: str) -> None:
        """Send an error as JSON, and close the connection."""
        body = json.dumps(ResponseFormatter.error(ApiError(400, msg))).encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open if the client's request is complete but the response is not.

        asyncio calls this when the client has closed its sending side.

        Returns: whether the connection stays open.
        """
        exchange = self.cycle  # uvicorn's state for the current request and response
        if exchange is None or exchange.more_body or exchange.response_complete:
            return False
        exchange.keep_alive = False
        if not exchange.response_started:
            probing_transport: Any = ProbingTransport(self.transport, self.loop)
            self.transport = exchange.transport = probing_transport
        return True


class ProbingTransport:
    """A transport that finds out whether a client has left or has only closed its sending side.

    Both look the same until the server writes. So the first bytes of the response are written one at a time, ahead of
    the response itself. If the client has left, the second write fails, and asyncio closes the connection.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        """Write the first byte."""
        self._transport = transport
        self._loop = loop
        self._n_sent = 0  # number of bytes of RESPONSE_START already sent
        self._next_interval = PROBE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._probe()

    def write(self, data: bytes) -> None:
        """Write `data`, except the bytes already sent.

        In the first call, `data` must start with RESPONSE_START.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._transport.write(data[self._n_sent :])
        self._n_sent = 0

    def _probe(self) -> None:
        """Write the next byte, and schedule the one after it. The last byte is left for the response itself."""
        is_last_byte = self._n_sent + 1 == len(RESPONSE_START)
        if is_last_byte or self._transport.is_closing():
            return
        next_byte = RESPONSE_START[self._n_sent : self._n_sent + 1]
        self._transport.write(next_byte)
        self._n_sent += 1
        self._timer = self._loop.call_later(self._next_interval, self._probe)
        self._next_interval *= 2

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute from the wrapped transport."""
        return getattr(self._transport, name)
