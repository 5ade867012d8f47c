"""OpenAI's endpoints, and what the completion endpoints take besides a batch file's bodies."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from ...completions.body import Body, ChatBody, CompletionBody
from ..formatter import respond
from .completion_formatter import ChatFormatter, TextFormatter
from .responses_body import ResponsesBody
from .responses_formatter import ResponsesFormatter

MOST_ANSWERS = 8
Likely = Annotated[int, Field(ge=0, le=20)]

router = APIRouter(tags=["OpenAI"])


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool = False


class _Served(Body):
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def answers(self) -> list[Body]:
        """A body for each answer wanted, each with a seed of its own if one was given."""
        if self.seed is None:
            return [self] * (self.n or 1)
        return [self.model_copy(update={"seed": self.seed + i}) for i in range(self.n or 1)]

    @property
    def with_usage(self) -> bool:
        """Whether a stream is to end with what it used."""
        return self.stream_options is not None and self.stream_options.include_usage


class ServedChat(ChatBody, _Served):
    """The body of `/v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: Likely | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        """Likely tokens to be told with each; None if not even its own log-probability is."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ServedCompletion(CompletionBody, _Served):
    """The body of `/v1/completions`."""

    logprobs: Likely | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        return self.logprobs


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ServedChat) -> Response:
    """Answer a chat's last message."""
    formatter = partial(ChatFormatter, with_usage=body.with_usage)
    return await respond(request, body, body.answers, formatter)


@router.post("/v1/completions")
async def completions(request: Request, body: ServedCompletion) -> Response:
    """Continue a text."""
    formatter = partial(TextFormatter, with_usage=body.with_usage)
    return await respond(request, body, body.answers, formatter)


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer a conversation's last message, as Codex asks; nothing of it is stored."""
    return await respond(request, body, [body.chat()], partial(ResponsesFormatter, body=body))


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served; requests may call it by any name."""
    names = request.app.state.engine.loaded.names
    return {"object": "list", "data": [_model(name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(name: str) -> dict[str, Any]:
    return _model(name)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "mlx-snapkv"}
