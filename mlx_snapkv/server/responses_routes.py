"""OpenAI's endpoint for responses, which Codex asks."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from .reading import checked, documented, json_of
from .respond import answered
from .responses_bodies import ResponsesBody
from .responses_forms import ResponseForm

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/responses", openapi_extra=documented(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer a conversation's last message; nothing of it is stored."""
    body = checked(ResponsesBody, await json_of(request))
    chat = body.chat(request.app.state.settings.volatile_headers)
    return await answered(request, body, [chat], partial(ResponseForm, body=body))
