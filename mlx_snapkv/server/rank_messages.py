"""A request as rank 0 sends it to the other ranks: its tokens, and what decides which ones follow."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ..completions.body import CommonBody, CompletionBody
from ..completions.grammar import Form
from .requests import EngineRequest

BODY = set(CommonBody.model_fields) - {"model", "n", "stream", "stream_options"}
REQUEST = ("seed", "number", "checkpoints")
# What of an answer is text, in which stop texts end it; the others don't see the messages that it follows from.
ANSWER = ("state", "tools", "chat", "by_functions", "prefill")


def sent(request: EngineRequest) -> dict[str, Any]:
    """The message about a prepared request."""
    asked = request.completion_request
    body = request.body.model_dump(include=BODY, exclude_unset=True)
    return {
        "request": {name: getattr(request, name) for name in REQUEST},
        "body": body | {"prompt": asked.prompt},
        "form": asked.constraint and asdict(asked.constraint.form),
        "answer": {name: getattr(asked, name) for name in ANSWER},
    }


def received(message: dict[str, Any], prepare: Callable[[EngineRequest], None]) -> EngineRequest:
    """The request of a message, once this rank has prepared it."""
    form = message["form"] and Form(**message["form"])
    request = EngineRequest(CompletionBody(**message["body"]), form=form, **message["request"])
    prepare(request)
    request.completion_request = replace(request.completion_request, **message["answer"])
    return request
