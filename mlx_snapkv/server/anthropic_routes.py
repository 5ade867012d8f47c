"""Anthropic's endpoints: messages, and counting their tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from .anthropic_bodies import CountedMessages, Messages
from .anthropic_forms import MessageForm
from .reading import checked, documented, json_of
from .respond import answered

COUNT_SECONDS = 60.0  # for a count, if the server was given no timeout

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages", openapi_extra=documented(Messages))
async def messages(request: Request) -> Response:
    """Answer a conversation's last message."""
    body = checked(Messages, await json_of(request))
    chat = body.chat(request.app.state.settings.volatile_headers)
    return await answered(request, body, [chat], MessageForm)


@router.post("/v1/messages/count_tokens", openapi_extra=documented(CountedMessages))
async def count_tokens(request: Request) -> dict[str, Any]:
    """The tokens of a message's prompt, which is not read."""
    body = checked(CountedMessages, await json_of(request))
    engine, settings = request.app.state.engine, request.app.state.settings
    counted = engine.count(body.chat(settings.volatile_headers))
    return {"input_tokens": await counted.wait(settings.timeout or COUNT_SECONDS)}
