"""Clients of a chat completions endpoint, each with a document of its own: what they ask, and when answers come."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..demo.questions import make_haystack
from ..errors import SnapKVError

FOLLOW_UPS = 3
ANSWER = 64  # tokens of every answer: ending it is forbidden
NEVER = -100.0  # OpenAI's least logit_bias


@dataclass
class Answer:
    """An answer as it came.

    Attributes:
        sent: when it was asked for, by `time.perf_counter`, as are
        pieces: when parts of its text came.
        n_tokens, n_prompt, n_cached: the server's own counts.
    """

    sent: float
    text: str = ""
    pieces: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_prompt: int = 0
    n_cached: int = 0

    @property
    def first_seconds(self) -> float:
        return self.pieces[0] - self.sent

    def take(self, event: dict[str, Any]) -> None:
        """A server-sent event of it."""
        if "error" in event:
            raise SnapKVError(f"a server has answered with an error: {event['error']}")
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                self.text += text
                self.pieces.append(time.perf_counter())
        if usage := event.get("usage"):
            self.n_tokens, self.n_prompt = usage["completion_tokens"], usage["prompt_tokens"]
            self.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Client:
    """One who asks about a document: the facts in it one after the other, everything said before sent again.

    Args:
        seed: of the document.
        n_tokens: of the document, about.

    Attributes:
        n_right: answers so far that have the fact's value, whatever follows: a number that may not end goes on.
    """

    def __init__(self, tokenizer: Any, seed: int, n_tokens: int):
        rng = random.Random(seed)
        self._document, self._facts = make_haystack(tokenizer, rng, 1 + FOLLOW_UPS, n_tokens)
        self._no_end = {str(token): NEVER for token in tokenizer.eos_token_ids}
        self._messages: list[dict[str, str]] = []
        self.n_right = 0

    def ask(self, url: str) -> Answer:
        """The answer to its next question."""
        fact = self._facts[len(self._messages) // 2]
        begin = "" if self._messages else f"{self._document}\n\n"
        self._messages.append({"role": "user", "content": f"{begin}{fact.question}"})
        answer = ask(url, self._messages, self._no_end)
        self._messages.append({"role": "assistant", "content": answer.text})
        self.n_right += fact.value in answer.text
        return answer


def ask(url: str, messages: list[dict[str, str]], logit_bias: dict[str, float]) -> Answer:
    """A streamed answer of `ANSWER` tokens, greedy; SnapKVError if there is none."""
    body = {
        "messages": messages,
        "max_tokens": ANSWER,
        "temperature": 0.0,
        "logit_bias": logit_bias,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    path = f"{url}/v1/chat/completions"
    answer = Answer(time.perf_counter())
    try:
        with httpx.stream("POST", path, json=body, timeout=None) as response:
            if response.status_code != 200:
                raise SnapKVError(f"a server has refused a request: {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line.removeprefix("data: ")))
    except httpx.TransportError as error:
        raise SnapKVError(f"a server has broken an answer off: {error}") from error
    if not answer.pieces:
        raise SnapKVError("a server has answered nothing")
    return answer


def ask_in_rounds(
    clients: list[Client], url: str, on_round: Callable[[int], None]
) -> list[list[Answer]]:
    """The answers to all questions, round by round: all ask at once, and again when the last has its answer."""
    rounds = []
    with ThreadPoolExecutor(len(clients)) as pool:
        for n in range(1 + FOLLOW_UPS):
            rounds.append(list(pool.map(lambda client: client.ask(url), clients)))
            on_round(n)
    return rounds


def tokens_while_all_answer(rounds: list[list[Answer]]) -> tuple[float, float]:
    """Tokens that come from when all clients of a round have their first until one has its last; and the seconds."""
    tokens = seconds = 0.0
    for answers in rounds:
        begin = max(answer.pieces[0] for answer in answers)
        end = min(answer.pieces[-1] for answer in answers)
        if end > begin:
            seconds += end - begin
            for answer in answers:
                share = sum(begin < at <= end for at in answer.pieces) / len(answer.pieces)
                tokens += share * answer.n_tokens
    return tokens, seconds
