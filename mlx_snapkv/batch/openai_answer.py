"""An answer as it comes, and the body that OpenAI's endpoints give it in."""

from __future__ import annotations

import time
import uuid
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter

from .openai_request import Asked


class Answer:
    """What has come of an answer: its text, its thoughts and the tools it calls.

    Stop texts are looked for in the text and not in the tokens, of which a word may be made in several ways.

    Attributes:
        n_tokens: the end-of-answer token included.
        finish_reason: None until it has ended.
    """

    def __init__(self, asked: Asked, tokenizer):
        self._asked = asked
        self._parser = tokenizer.tool_parser
        self._detokenizer = tokenizer.detokenizer
        stops = TextStateMachine({"normal": [(text, None) for text in asked.stop]})
        self._until_stop = stops.make_state()
        # What continues a text has no place for thoughts and calls: it stays as it is.
        parts = make_text_state_machine(tokenizer) if asked.chat else TextStateMachine()
        self._parts = parts.make_state(asked.state)
        self._pieces: dict[str, list[str]] = {}
        self._calls: list[str] = []
        self._parsed: list[dict[str, Any]] = []
        self._state = asked.state
        self.n_tokens = 0
        self.finish_reason: str | None = None

    def add(self, token: int, finish_reason: str | None) -> None:
        """Take a token in, the last one with mlx-lm's `finish_reason`."""
        self.n_tokens += 1
        if finish_reason != "stop":
            self._detokenizer.add_token(token)
        if finish_reason is not None:
            self._detokenizer.finalize()
        self._until_stop, segments = TextStateMachine.split(
            self._until_stop, self._detokenizer.last_segment
        )
        self._take(segments[0][1])
        if self._until_stop[0] is None:
            finish_reason = "stop"
        elif finish_reason is not None:
            self._take(TextStateMachine.flush(self._until_stop)[1])
        if finish_reason is not None:
            self._end(finish_reason)

    def _take(self, text: str) -> None:
        """Text that is no part of a stop text."""
        self._parts, segments = TextStateMachine.split(self._parts, text)
        for state, piece in segments:
            self._put(state, piece)

    def _put(self, state: str, piece: str) -> None:
        if self._state == "tool" and state != "tool":
            self._calls.append("".join(self._pieces.pop("tool", [])))
        self._state = state
        self._pieces.setdefault(state, []).append(piece)

    def _end(self, finish_reason: str) -> None:
        _, rest, state = TextStateMachine.flush(self._parts)
        self._put(state, rest)
        if open_call := "".join(self._pieces.pop("tool", [])):
            self._calls.append(open_call)
        self.finish_reason = finish_reason

    @property
    def text(self) -> str:
        return "".join(self._pieces.get("normal", []))

    def body(self, model: str, extra: dict[str, Any]) -> dict[str, Any]:
        """The endpoint's response body, `extra` as its field `mlx_snapkv`."""
        kind, name = (
            ("chatcmpl", "chat.completion") if self._asked.chat else ("cmpl", "text_completion")
        )
        calls = self._tool_calls()
        reason = "tool_calls" if calls and self.finish_reason == "stop" else self.finish_reason
        said = self._message(calls) if self._asked.chat else {"text": self.text}
        n_prompt = len(self._asked.prompt)
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": self.n_tokens,
                "total_tokens": n_prompt + self.n_tokens,
            },
            "mlx_snapkv": extra,
        }

    def _message(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if thoughts := "".join(self._pieces.get("reasoning", [])):
            message["reasoning"] = thoughts
        if calls:
            message |= {"content": self.text or None, "tool_calls": calls}
        return {"message": message}

    def _tool_calls(self) -> list[dict[str, Any]]:
        """The calls as the endpoint has them; one that can't be parsed is text again."""
        found, self._calls = self._calls, []
        for text in found:
            try:
                calls = ToolCallFormatter(self._parser, self._asked.tools)([text])
            except Exception:  # parsers of what a model wrote
                calls = []
            self._parsed += calls
            if not calls:
                self._pieces.setdefault("normal", []).append(text)
        return self._parsed
