"""One prompt answered by several methods, each answer beside the full cache's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, kv_bytes
from ..engine.prompt_plan import PREFILL_STEP_SIZE, ProgressCallback, gate
from ..engine.request import held_tokens
from .answering import Answer, decode
from .divergence import Reference
from .methods import Method
from .reading import Reading, read_once

BEFORE = 8  # tokens shown before the first that differs


@dataclass(frozen=True)
class Compared:
    """What came of a method.

    Attributes:
        tokens: of the answer, with the one that ends it if that came.
        entries: per KV head, the most of any layer; `kv_bytes` of all layers.
        first_token_seconds: from the first token read; methods that choose from one reading share it.
        tokens_per_second: decoded from what was kept; None if too few were.
        kl: to the full cache over its answer, the mean in nats a token, as `eval fidelity --setting known` has it.
        differs: the first token that is not the full cache's: its place, what came before it, the full cache's token
            and this one, as texts; None if all are the same.
        reason: why nothing was evicted, if so.
        kept: by token of the prompt, the share of layers and heads that keep it, `(n,)`; None with a memory.
    """

    name: str
    text: str
    tokens: list[int]
    entries: int
    kv_bytes: int
    first_token_seconds: float
    tokens_per_second: float | None
    kl: float = 0.0
    differs: tuple[int, str, str, str] | None = None
    reason: str | None = None
    kept: np.ndarray | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same, without `kept`."""
        return {name: value for name, value in vars(self).items() if name != "kept"}


class Comparison:
    """A prompt's greedy answers, those of `generate`; it is read once for all methods that choose from full caches.

    Args:
        tokens: token ids of the prompt.
        methods: all that will be asked for.
        max_tokens: of an answer, at most.
        progress: as mlx-lm's `prompt_progress_callback`, of every reading.

    Raises:
        SnapKVError: as `read_once` does.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tokens: Sequence[int],
        methods: Sequence[Method],
        max_tokens: int,
        progress: ProgressCallback | None = None,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        self._model, self._tokenizer, self._tokens = model, tokenizer, list(tokens)
        self._max_tokens = max_tokens
        self._options: dict[str, Any] = {
            "prefill_step_size": prefill_step_size,
            "prompt_progress_callback": progress,
        }
        self._policies = [method.policy for method in methods if method.shares_reading]
        self._full: Compared | None = None

    def answer(
        self, method: Method, on_text: Callable[[str], None] = lambda text: None
    ) -> Compared:
        """A method's answer, whose text is given to `on_text` as it comes; others' are judged by the full cache's."""
        if method.policy is None:
            begun, full_cache = self._reading.answer(1), self._reading.compressed(None)
            self._full = self._compared(method, self._decode(begun, full_cache, on_text))
            self._reference = Reference(self._reading, self._full.tokens)
            return self._full
        full = self._full or self.answer(Method())
        n = len(self._tokens)
        if (reason := gate(method.policy, n, None, self._max_tokens)) is not None:
            on_text(full.text)
            return replace(full, name=method.name, reason=reason)
        held: list[list] = []  # what was kept, before anything is decoded from it
        if method.shares_reading:
            kept = self._reading.compressed(method.policy, answering=True)
            held.append(copy.deepcopy(kept[0]))
            begun = full.tokens[: max(0, held_tokens(self._model, kept[0]) - n + 1)]
            answer = self._decode(begun, kept, on_text)
        else:
            cache = make_prompt_cache(self._model)
            options = {"policy": method.policy, **method.options, **self._options}
            if not method.options:
                options["on_report"] = lambda report: held.append(copy.deepcopy(cache))
            answer = self._decode([], (cache, None), on_text, **options)
        if held:
            logprobs = self._reference.predictions(held[0])
        else:  # what the answer's tokens choose, whether or not they are verified
            asked = method.options | {"verify": None}
            asked["prefill_step_size"] = self._options["prefill_step_size"]
            logprobs = self._reference.generated(method.policy, **asked)
        return replace(
            self._compared(method, answer),
            kl=float(self._reference.figures(logprobs)["kl"]),
            kept=self._share_kept(held[0]) if held else None,
            differs=self._difference(full.tokens, answer.tokens),
        )

    def _decode(self, begun: Sequence[int], kept: Any, on_text: Any, **options: Any) -> Answer:
        asked = self._model, self._tokenizer, self._tokens, begun[: self._max_tokens], kept
        return decode(*asked, self._max_tokens, on_text, **options)

    def _compared(self, method: Method, answer: Answer) -> Compared:
        times = answer.times[answer.n_before :]
        shared = method.shares_reading
        return Compared(
            name=method.name,
            text=answer.text,
            tokens=answer.tokens,
            entries=answer.report.entries or len(self._tokens),
            kv_bytes=answer.report.kv_bytes_after or kv_bytes(answer.cache),
            first_token_seconds=self._read_seconds if shared else answer.times[1] - answer.times[0],
            tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 2 else None,
        )

    @cached_property
    def _reading(self) -> Reading:
        started = time.perf_counter()
        reading = read_once(self._model, self._tokens, self._policies, **self._options)
        self._read_seconds = time.perf_counter() - started
        return reading

    def _share_kept(self, caches: list) -> np.ndarray:
        layers = attention_layers(self._model, caches)
        held = [np.array(layer.entries_in(caches).held().positions[0]) for layer in layers]
        n = len(self._tokens)
        counts = np.bincount(np.concatenate([rows.ravel() for rows in held]), minlength=n)[:n]
        return counts / sum(map(len, held))

    def _difference(self, full: list[int], tokens: list[int]) -> tuple[int, str, str, str] | None:
        if tokens == full:
            return None
        pairs = enumerate(zip(tokens, full))
        i = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(tokens), len(full)))
        parts = full[max(0, i - BEFORE) : i], full[i : i + 1], tokens[i : i + 1]
        before, theirs, ours = map(self._tokenizer.decode, parts)
        return i, before, theirs, ours
