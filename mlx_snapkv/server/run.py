"""Starting and stopping: uvicorn around the application, the engine beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import SnapKVError
from ..paths import reason
from .access import Settings
from .api_error import bad_request
from .app import create_app
from .engine import Engine
from .openai.completion_formatter import OpenAIFormatter

GRACE = 5  # seconds that running answers, then the engine, have when the server is told to stop


class Protocol(H11Protocol):
    """uvicorn's HTTP, which tells clients that speak no HTTP so in JSON."""

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(OpenAIFormatter.error(bad_request(msg))).encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def listening(settings: Settings) -> socket.socket:
    """A socket of the server's address; SnapKVError if it can't have it."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        found.close()
        why = reason(error) if isinstance(error, OSError) else "the port must be 0 to 65535"
        raise SnapKVError(
            f"--host {settings.host} --port {settings.port}: {why}; give another one"
        ) from error
    return found


def serve(
    engine: Engine, settings: Settings, place: socket.socket, on_start: Callable[[], None]
) -> None:
    """Serve until told to stop, or `should_exit` of the engine's `server` is set; answers under way are ended then.

    Args:
        on_start: called when requests are taken.

    Raises:
        Exception: what has ended the engine.
    """
    config = uvicorn.Config(
        create_app(engine, settings),
        http=Protocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
        server_header=False,
    )
    engine.server = _Server(config, engine, on_start)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # which uvicorn passes on when it has ended
            engine.server.run(sockets=[place])
    finally:
        engine.stop_and_join()
    if engine.failure is not None:
        raise engine.failure


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, on_start: Callable[[], None]):
        super().__init__(config)
        self._engine, self._on_start = engine, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end_answers()
        await super().shutdown(sockets)
        # A SIGTERM ends the process right after this: other ranks are to be told before.
        await asyncio.to_thread(self._engine.await_end, GRACE)
