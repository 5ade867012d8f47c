"""The FastAPI application, and the uvicorn server that runs it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .._version import __version__
from ..content_policy import content_policy
from ..errors import SnapKVError
from ..paths import reason
from .access import ANTHROPIC_ID_HEADER, OPENAI_ID_HEADER, AllowedOrigins, Gate, Settings
from .anthropic.messages import router as anthropic
from .changing_lines import ChangingLines
from .engine import Engine
from .models import router as models
from .openai.completions import router as openai
from .openai.responses import router as responses
from .protocol import Protocol

CHAT_HTML = Path(__file__).with_name("page.html")
router = APIRouter(tags=["monitoring"])
OnStart = Callable[[uvicorn.Server], None]
# Seconds to wait on shutdown for unfinished answers, and then for the engine.
GRACE = 5


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """Create the application for a running engine."""
    app = FastAPI(title="mlx-snapkv", version=__version__)
    app.state.engine = engine
    app.state.settings = settings
    app.state.changing_lines = ChangingLines()
    app.state.created = int(time.time())  # when the server started, in Unix seconds
    for api_router in (openai, responses, anthropic, models, router):
        app.include_router(api_router)
    app.add_exception_handler(HTTPException, _reraise)
    app.add_exception_handler(RequestValidationError, _reraise)
    app.add_middleware(Gate, settings=settings, metrics=engine.metrics)
    if settings.origins:
        app.add_middleware(
            AllowedOrigins,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            # Without this, some browsers block requests from allowed pages on the public internet to this server's
            # private address.
            allow_private_network=True,
            expose_headers=(OPENAI_ID_HEADER, ANTHROPIC_ID_HEADER),
        )
    return app


@router.get("/health")
async def health(request: Request) -> Response:
    """Return status 200 if the engine accepts requests, otherwise 503."""
    if request.app.state.engine.is_alive:
        return JSONResponse({"status": "ok"}, 200)
    return JSONResponse({"status": "unavailable"}, 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return metrics for Prometheus."""
    return Response(request.app.state.engine.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Return the chat page. Its Content-Security-Policy allows connections only to this server."""
    html = CHAT_HTML.read_text(encoding="utf-8")
    allowed_sources = {"connect_src": "'self'", "img_src": "data:", "frame_ancestors": "'none'"}
    headers = {
        "Content-Security-Policy": content_policy(html, **allowed_sources),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, media_type="text/html", headers=headers)


async def _reraise(request: Request, error: Exception) -> Response:
    """Re-raise an error, so that `Gate` rather than FastAPI formats it."""
    raise error


class _Server(uvicorn.Server):
    """A uvicorn server that also stops the engine on shutdown."""

    def __init__(self, config: uvicorn.Config, engine: Engine, on_start: OnStart):
        super().__init__(config)
        self._engine = engine
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Don't wait yet. Once the engine is stopping, open requests fail, and uvicorn waits for their responses.
        self._engine.stop(0)
        await super().shutdown(sockets)
        # After SIGTERM, the process exits when this method returns. With several Macs, the engine must first tell the
        # other ranks to stop, so wait for it.
        await asyncio.to_thread(self._engine.stop, GRACE)


def bind_socket(settings: Settings) -> socket.socket:
    """Bind a socket to the server's address.

    Raises: SnapKVError: the address is invalid or not available.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = reason(error) if isinstance(error, OSError) else "the port must be 0 to 65535"
        raise SnapKVError(
            f"--host {settings.host} --port {settings.port}: {why}; give another one"
        ) from error
    return listener


def serve(engine: Engine, settings: Settings, listener: socket.socket, on_start: OnStart) -> None:
    """Serve until a signal arrives or the uvicorn server's `should_exit` is set.

    Args:
        engine: the engine that answers requests.
        settings: the server's settings.
        listener: the bound socket.
        on_start: called with the uvicorn server once it accepts requests.
    """
    config = uvicorn.Config(
        create_app(engine, settings),
        http=Protocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
        server_header=False,
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn re-raises it after shutdown
            _Server(config, engine, on_start).run(sockets=[listener])
    finally:
        engine.stop()
