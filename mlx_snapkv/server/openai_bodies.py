"""What OpenAI's completion endpoints take when they are served: a batch file's bodies, and streams besides."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..batch.openai_body import Body, ChatBody, CompletionBody
from .turns import SYSTEM
from .volatile import content_without_headers

MOST_ANSWERS = 8
MOST_LIKELY = 20


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
    def tells_usage(self) -> bool:
        """Whether a stream is to end with what it used."""
        return self.stream_options is not None and self.stream_options.include_usage


class ServedChat(ChatBody, _Served):
    """The body of `/v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELY)] | None = None

    def without_headers(self, names: Collection[str]) -> ServedChat:
        """The same, its system prompt without the header lines of these names that it begins with."""
        first, *rest = self.messages
        if first.role not in SYSTEM:
            return self
        content = content_without_headers(first.content, names)
        changed = [first.model_copy(update={"content": content}), *rest]
        return self.model_copy(update={"messages": changed})

    @property
    def n_top_logprobs(self) -> int | None:
        """Likely tokens to be told with each; None if not even its own probability is."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ServedCompletion(CompletionBody, _Served):
    """The body of `/v1/completions`."""

    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELY)] | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        return self.logprobs
