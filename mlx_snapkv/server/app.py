"""The HTTP side: FastAPI with thin endpoints over the engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._version import __version__
from ..content_policy import content_policy
from .access import Access, Settings, require_utf8
from .anthropic.formatter import MessageFormatter
from .anthropic.messages import router as anthropic
from .api_error import as_api_error
from .engine import Engine
from .metrics import Metrics
from .openai.completion_formatter import OpenAIFormatter
from .openai.endpoints import router as openai

PAGE = Path(__file__).with_name("page.html")


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """The application; the engine runs already."""
    app = FastAPI(title="mlx-snapkv", version=__version__, dependencies=[Depends(require_utf8)])
    app.state.engine, app.state.settings = engine, settings
    app.include_router(openai)
    app.include_router(anthropic)
    app.get("/health", tags=["monitoring"])(health)
    app.get("/metrics", tags=["monitoring"])(metrics)
    app.get("/", include_in_schema=False)(page)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_middleware(Access, settings=settings)
    app.add_middleware(ErrorResponses, metrics=engine.metrics)
    if settings.origins:
        origins = list(settings.origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def health(request: Request) -> Response:
    """200 as long as the thread that generates is alive."""
    alive = request.app.state.engine.is_healthy
    return JSONResponse({"status": "ok" if alive else "unavailable"}, 200 if alive else 503)


async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(request.app.state.engine.metrics.text(), media_type="text/plain; version=0.0.4")


async def page() -> Response:
    """The page for the person at the Mac: one file that asks nobody but this server, with the key if it has one."""
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    html = PAGE.read_text(encoding="utf-8")
    allowed = {"connect_src": "'self'", "img_src": "data:", "frame_ancestors": "'none'"}
    return html, content_policy(html, **allowed)


class ErrorResponses:
    """ASGI middleware around everything: whatever is raised is told in the API's own form, and counted."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if status:  # the response has begun: all that is left is to end it
                raise
            await _error_response(scope, error)(scope, receive, noted)
        # By the names of our own: clients may ask for any, and each would stay.
        path = getattr(scope.get("route"), "path", "other")
        self._metrics.responses.labels(path, str(status)).inc()


async def _refused(request: Request, error: Exception) -> Response:
    """What FastAPI refuses by itself, and what the endpoints do."""
    return _error_response(request.scope, error)


def _error_response(scope: Scope, error: Exception) -> JSONResponse:
    """Anthropic's clients use a path of their own, or say so in a header."""
    told = as_api_error(error)
    if told.status_code in (404, 405) and told is not error:
        what = f"{scope['method']} {scope['path'][:200]}"
        told.detail = (
            f"{what} is not allowed" if told.status_code == 405 else f"there is no {what} here"
        )
    messages = scope["path"].startswith("/v1/messages")
    is_anthropic = messages or "anthropic-version" in Headers(scope=scope)
    form = MessageFormatter if is_anthropic else OpenAIFormatter
    return JSONResponse(form.error(told), told.status_code, told.headers)
