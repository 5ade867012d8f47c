"""The HTTP side: FastAPI with thin endpoints over the engine."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from .._version import __version__
from ..paths import here
from .access import Access
from .engine import Engine
from .failures import ApiError, bad_request
from .openai_forms import OpenAIForm
from .openai_routes import router as openai_router
from .respond import as_api_error
from .settings import Settings


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """The application; the engine runs already."""
    app = FastAPI(title="mlx-snapkv", version=__version__, summary="Long prompts, small caches.")
    app.state.engine, app.state.settings = engine, settings
    app.include_router(openai_router)
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"])
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(Access, settings=settings)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(Guarded, engine=engine)
    return app
