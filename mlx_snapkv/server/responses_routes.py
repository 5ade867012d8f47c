"""OpenAI's endpoint for responses, which Codex asks."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from .exchange import Exchange
from .reading import checked, documented, json_of
from .respond import respond
from .responses_bodies import ResponsesBody
from .responses_forms import ResponseForm

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/responses", openapi_extra=documented(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer a conversation's last message; nothing of it is stored."""
    body = checked(ResponsesBody, await json_of(request))
    engine, settings = request.app.state.engine, request.app.state.settings
    name = body.model if isinstance(body.model, str) else engine.loaded.name
    chat = body.chat(settings.volatile_headers)
    exchange = Exchange(engine, request, [chat], settings.timeout)
    return await respond(exchange, ResponseForm(name, body), bool(body.stream))
