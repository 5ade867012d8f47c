"""OpenAI's endpoints: models, chat completions, completions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ..batch.openai_body import Body
from .openai_bodies import ServedChat, ServedCompletion
from .openai_forms import ChatForm, CompletionForm, OpenAIForm
from .reading import checked, documented, json_of
from .respond import answered

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", openapi_extra=documented(ServedChat))
async def chat_completions(request: Request) -> Response:
    """Answer a chat's last message."""
    return await _answered(request, ServedChat, ChatForm)


@router.post("/v1/completions", openapi_extra=documented(ServedCompletion))
async def completions(request: Request) -> Response:
    """Continue a text."""
    return await _answered(request, ServedCompletion, CompletionForm)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served; requests may call it by any name."""
    return {
        "object": "list",
        "data": [_model(name) for name in request.app.state.engine.loaded.names],
    }


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    return _model(name)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "mlx-snapkv"}


async def _answered(request: Request, kind: type[Body], form: type[OpenAIForm]) -> Response:
    body: Any = checked(kind, await json_of(request))
    if isinstance(body, ServedChat):
        body = body.without_headers(request.app.state.settings.volatile_headers)
    made = partial(form, with_usage=body.tells_usage)
    return await answered(request, body, body.answers, made)
