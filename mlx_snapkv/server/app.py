"""The HTTP side: FastAPI with thin endpoints over the engine."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._version import __version__
from .access import Access
from .anthropic_forms import MessageForm
from .anthropic_routes import router as anthropic
from .engine import Engine
from .failures import ApiError
from .openai_forms import OpenAIForm
from .openai_routes import router as openai
from .page import router as page
from .respond import Form, told
from .responses_routes import router as responses
from .settings import Settings
from .watching import router as watching


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """The application; the engine runs already."""
    app = FastAPI(title="mlx-snapkv", version=__version__, summary="Long prompts, small caches.")
    app.state.engine, app.state.settings = engine, settings
    app.include_router(openai)
    app.include_router(responses)
    app.include_router(anthropic)
    app.include_router(watching)
    app.include_router(page)
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(Access, settings=settings)
    app.add_middleware(Told, engine=engine)
    if settings.origins:
        origins = list(settings.origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Told:
    """ASGI middleware around everything: whatever is raised is told in the API's own form, and counted."""

    def __init__(self, app: ASGIApp, engine: Engine):
        self._app, self._metrics = app, engine.metrics

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
            await _failed(scope, told(error))(scope, receive, noted)
        # By the names of our own: clients may ask for any, and each would stay.
        self._metrics.responded(getattr(scope.get("route"), "path", "other"), status)


def _failed(scope: Scope, error: ApiError) -> JSONResponse:
    return JSONResponse(_form(scope).error(error), error.status, error.headers)


def _form(scope: Scope) -> type[Form]:
    """What the client speaks: Anthropic's have a path of their own, and say so in a header."""
    messages = scope["path"].startswith("/v1/messages")
    return MessageForm if messages or "anthropic-version" in Headers(scope=scope) else OpenAIForm


def _refused(request: Request, error: Any) -> Response:
    """What FastAPI refuses by itself: unknown paths and methods."""
    method = f"{request.method} {request.url.path[:200]}"
    told = {404: f"there is no {method} here", 405: f"{method} is not allowed"}
    message = told.get(error.status_code, str(error.detail))
    failure = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return _failed(request.scope, failure)
