"""The three APIs that an agent may use: request bodies, and answers in responses and streams.

A history is a list of messages in the format of OpenAI's chat completions.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SYSTEM = "You are an agent. Work with the tools, and answer in a few words."
TOOLS = [
    {
        "name": "run",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
            "required": ["command"],
        },
    },
    {
        "name": "edit",
        "description": "Replace a line of a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "line": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "text": {"type": "string"},
            },
            "required": ["path", "text"],
        },
    },
]
SCHEMA = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "next": {"type": "string", "maxLength": 20}},
    "required": ["done", "next"],
    "additionalProperties": False,
}
Body = dict[str, Any]
Messages = list[dict[str, Any]]


@dataclass
class Answer:
    """An answer, without the ids that differ between equal requests.

    Attributes:
        text: the answer's text.
        calls: names and arguments of the calls.
        why: why the answer ended, in the API's own words.
    """

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    why: str | None = None


class API(ABC):
    """One of the server's APIs."""

    path: str
    LIMIT = "max_tokens"

    @abstractmethod
    def body(self, history: Messages) -> Body:
        """Return a request's body, with the tools."""

    @abstractmethod
    def forced(self) -> Body:
        """Return the fields that force the answer to be a call."""

    @abstractmethod
    def formatted(self) -> Body:
        """Return the fields that force the answer to follow `SCHEMA`."""

    @abstractmethod
    def answer(self, response: Body) -> Answer:
        """Return the answer from a response."""

    @abstractmethod
    def streamed(self, events: Iterable[Body]) -> Answer:
        """Return the answer from a stream's events."""


class Chat(API):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"

    def body(self, history: Messages) -> Body:
        """Return the history with a system message."""
        tools = [{"type": "function", "function": tool} for tool in TOOLS]
        return {"messages": [{"role": "system", "content": SYSTEM}, *history], "tools": tools}

    def forced(self) -> Body:
        """Return `tool_choice`."""
        return {"tool_choice": "required"}

    def formatted(self) -> Body:
        """Return `response_format`."""
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "state", "schema": SCHEMA},
        }
        return {"response_format": response_format, "tool_choice": "none"}

    def answer(self, response: Body) -> Answer:
        """Return the answer in the first choice."""
        (choice,) = response["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls = [(function["name"], function["arguments"]) for function in functions]
        return Answer(message["content"] or "", calls, choice["finish_reason"])

    def streamed(self, events: Iterable[Body]) -> Answer:
        """Join the answer's parts from the deltas. Each call arrives complete."""
        answer = Answer()
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                answer.text += delta.get("content") or ""
                functions = [call["function"] for call in delta.get("tool_calls") or []]
                answer.calls += [
                    (function["name"], function["arguments"]) for function in functions
                ]
                answer.why = choice["finish_reason"] or answer.why
        return answer


class Responses(API):
    """OpenAI's responses."""

    path = "/v1/responses"
    LIMIT = "max_output_tokens"

    def body(self, history: Messages) -> Body:
        """Return the history as items."""
        items: list[Body] = []
        for message in history:
            if message["role"] == "tool":
                result = {"call_id": message["tool_call_id"], "output": message["content"]}
                items.append({"type": "function_call_output", **result})
                continue
            if message["content"]:
                items.append({"role": message["role"], "content": message["content"]})
            for call in message.get("tool_calls", ()):
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        tools = [{"type": "function", **tool} for tool in TOOLS]
        return {"instructions": SYSTEM, "input": items, "tools": tools, "store": False}

    def forced(self) -> Body:
        """Return `tool_choice`."""
        return {"tool_choice": "required"}

    def formatted(self) -> Body:
        """Return `text.format`."""
        response_format = {"type": "json_schema", "name": "state", "schema": SCHEMA}
        return {"text": {"format": response_format}, "tool_choice": "none"}

    def answer(self, response: Body) -> Answer:
        """Return the texts and calls of the output items."""
        items = response["output"]
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        calls = [
            (item["name"], item["arguments"]) for item in items if item["type"] == "function_call"
        ]
        return Answer("".join(part["text"] for part in parts), calls, response["status"])

    def streamed(self, events: Iterable[Body]) -> Answer:
        """Return the answer from the last event, which contains the whole response."""
        *_, last = events
        return self.answer(last["response"])


class AnthropicMessages(API):
    """Anthropic's messages."""

    path = "/v1/messages"

    def body(self, history: Messages) -> Body:
        """Return the history as blocks."""
        messages: Messages = []
        for message in history:
            blocks: list[Body] = []
            if message["role"] == "tool":
                result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
                blocks.append({"type": "tool_result", **result})
            elif message["content"]:
                blocks.append({"type": "text", "text": message["content"]})
            for call in message.get("tool_calls", ()):
                function = call["function"]
                arguments = json.loads(function["arguments"])
                blocks.append(
                    {
                        "type": "tool_use",
                        "id": call["id"],
                        "name": function["name"],
                        "input": arguments,
                    }
                )
            role = "assistant" if message["role"] == "assistant" else "user"
            messages.append({"role": role, "content": blocks})
        tools = [
            {
                "name": tool["name"],
                "input_schema": tool["parameters"],
                "description": tool["description"],
            }
            for tool in TOOLS
        ]
        return {"system": SYSTEM, "messages": messages, "tools": tools}

    def forced(self) -> Body:
        """Return `tool_choice`."""
        return {"tool_choice": {"type": "any"}}

    def formatted(self) -> Body:
        """Return `output_config`."""
        response_format = {"type": "json_schema", "schema": SCHEMA}
        return {"output_config": {"format": response_format}, "tool_choice": {"type": "none"}}

    def answer(self, response: Body) -> Answer:
        """Return the texts and calls of the content blocks."""
        answer = Answer(why=response["stop_reason"])
        for block in response["content"]:
            if block["type"] == "tool_use":
                arguments = json.dumps(block["input"], ensure_ascii=False)
                answer.calls.append((block["name"], arguments))
            else:
                answer.text += block["text"]
        return answer

    def streamed(self, events: Iterable[Body]) -> Answer:
        """Join the answer's blocks from the events."""
        response: Body = {"content": [], "stop_reason": None}
        for event in events:
            if event["type"] == "content_block_start":
                response["content"].append(event["content_block"] | {"json": ""})
            elif event["type"] == "content_block_delta":
                block, delta = response["content"][-1], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                else:
                    block["json"] += delta["partial_json"]
            elif event["type"] == "message_delta":
                response["stop_reason"] = event["delta"]["stop_reason"]
        for block in response["content"]:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
        return self.answer(response)


APIS: dict[str, API] = {api.path: api for api in (Chat(), Responses(), AnthropicMessages())}
