"""One prompt answered several ways, each answer beside the full cache's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, kv_bytes
from ..engine.generate import stream_generate
from ..engine.prompt_plan import PREFILL_STEP_SIZE, ProgressCallback, gate
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import held_tokens
from ..policies import Policy, Stages
from .divergence import Reference
from .reading import Reading, read_once, shares_reading

FULL = "full cache"
AROUND = 8  # tokens shown before the first that differs


@dataclass(frozen=True)
class Way:
    """A way to answer: a policy, or None for the full cache, and options of `stream_generate` such as `memory`."""

    policy: Policy | Stages | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        said = (f", {k} {v}" for k, v in self.options.items() if v not in ("drop", "token", None))
        return FULL if self.policy is None else str(self.policy) + "".join(said)


@dataclass(frozen=True)
class Answer:
    """What came of a way.

    Attributes:
        tokens: of the answer, with the one that ends it if that came.
        entries: per KV head, the most of any layer; `kv_bytes` of all layers.
        first_token_seconds: from the first token read; ways that choose from one reading share it.
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


class _Stream:
    """An answer's tokens as they come: their text is given to `on_text`, as mlx-lm's loop decodes it."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]):
        self._stops, self._on_text = tokenizer.eos_token_ids, on_text
        self._detokenizer = tokenizer.detokenizer
        self._detokenizer.reset()
        self.tokens: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if token not in self._stops:
            self._detokenizer.add_token(token)
            self._tell()

    @property
    def ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self._stops

    def close(self) -> None:
        self._detokenizer.finalize()
        self._tell()

    def _tell(self) -> None:
        said = self._detokenizer.last_segment
        self.text += said
        self._on_text(said)


class Comparison:
    """A prompt that is read once for all ways that choose from full caches; the others read for themselves.

    Answers are greedy, and those of `generate`.

    Args:
        tokens: token ids of the prompt.
        ways: all that will be asked for.
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
        ways: Sequence[Way],
        max_tokens: int,
        progress: ProgressCallback | None = None,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        self._model, self._tokenizer, self._tokens = model, tokenizer, list(tokens)
        self._max_tokens, self._progress = max_tokens, progress
        self._step_size = prefill_step_size
        self._shared = [way for way in ways if not way.options and way.policy is not None]
        self._full_answer: Answer | None = None

    def answer(self, way: Way, on_text: Callable[[str], None] = lambda text: None) -> Answer:
        """A way's answer; of the full cache first, whose answer the others are judged by."""
        stream = _Stream(self._tokenizer, on_text)
        if way.policy is None:
            self._full_answer = self._decoded(way, stream, self._reading.full(), [self._first])
            return self._full_answer
        full = self._full_answer or self.answer(Way())
        reason = gate(way.policy, len(self._tokens), None, self._max_tokens)
        if reason is not None:
            on_text(full.text)
            return replace(full, name=way.name, reason=reason)
        if shares_reading(way.policy) and not way.options:
            cache, report = self._reading.answering(way.policy)
            n_chosen = max(0, held_tokens(self._model, cache) - len(self._tokens) + 1)
            going_on = copy.deepcopy(cache)
            found = self._decoded(way, stream, going_on, full.tokens[:n_chosen], report)
            found = replace(found, kept=self._kept(cache), kl=self._kl_of(cache))
        else:
            found = self._read_by_itself(way, stream)
        return replace(found, differs=self._difference(found.tokens))

    @cached_property
    def _reading(self) -> Reading:
        started = time.perf_counter()
        policies = [way.policy for way in self._shared]
        reading = read_once(
            self._model, self._tokens, policies, (), self._progress, self._step_size
        )
        self._read_seconds = time.perf_counter() - started
        return reading

    @property
    def _first(self) -> int:
        return int(mx.argmax(self._reading.following).item())  # type: ignore[arg-type]

    def _decoded(
        self,
        way: Way,
        stream: _Stream,
        cache: list,
        known: Sequence[int],
        report: CompressionReport | None = None,
    ) -> Answer:
        """The answer that begins with the tokens `known` and goes on from a cache, which has not been fed the last."""
        report = report or CompressionReport(NO_POLICY, len(self._tokens))
        nbytes = report.kv_bytes_after or kv_bytes(cache)
        for token in known[: self._max_tokens]:
            stream.add(token)
        left = self._max_tokens - len(stream.tokens)
        rest = [*self._tokens, *stream.tokens][held_tokens(self._model, cache) :]
        times = [time.perf_counter()]
        if left > 0 and not stream.ended:
            for response in stream_generate(
                self._model, self._tokenizer, rest, left, prompt_cache=cache
            ):
                stream.add(response.token)
                times.append(time.perf_counter())
        stream.close()
        return self._told(way, stream, report, nbytes, self._read_seconds, times)

    def _told(
        self,
        way: Way,
        stream: _Stream,
        report: CompressionReport,
        nbytes: int,
        first: float,
        times: list[float],
    ) -> Answer:
        """An answer, decoded from what was kept at these times; `first` are the seconds to its first token."""
        speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 2 else None
        entries = report.entries or len(self._tokens)
        return Answer(way.name, stream.text, stream.tokens, entries, nbytes, first, speed)

    def _read_by_itself(self, way: Way, stream: _Stream) -> Answer:
        """An answer of `stream_generate`; its KL is that of a copy of what was kept, or of a second reading."""
        cache, reports = make_prompt_cache(self._model), []
        kept: list[list] = []
        compressed_at = 0

        def on_report(report: CompressionReport) -> None:
            nonlocal compressed_at
            reports.append(report)
            compressed_at = len(times)
            if not way.options:
                kept.append(copy.deepcopy(cache))

        started, times = time.perf_counter(), []
        for response in stream_generate(
            self._model,
            self._tokenizer,
            self._tokens,
            self._max_tokens,
            policy=way.policy,
            prompt_cache=cache,
            on_report=on_report,
            prompt_progress_callback=self._progress,
            prefill_step_size=self._step_size,
            **way.options,
        ):
            stream.add(response.token)
            times.append(time.perf_counter())
        stream.close()
        report, first = reports[0], times[0] - started
        found = self._told(way, stream, report, report.kv_bytes_after, first, times[compressed_at:])
        if not kept:
            return replace(found, kl=self._forced_kl(way))
        return replace(found, kept=self._kept(kept[0]), kl=self._kl_of(kept[0]))

    @cached_property
    def _reference(self) -> Reference:
        """What the full cache says to each token of its answer."""
        full, following = self._reading.full(), self._reading.following
        return Reference(self._model, self._tokens, self._answered, full, following)

    @property
    def _answered(self) -> list[int]:
        assert self._full_answer is not None
        return self._full_answer.tokens

    def _kl_of(self, cache: list) -> float:
        """Of what a cache says to the full cache's answer; tokens that it was fed already are the full cache's."""
        return float(self._reference.divergence(self._reference.predictions(cache)))

    def _forced_kl(self, way: Way) -> float:
        options = {name: x for name, x in way.options.items() if name != "verify"}
        given = options | {"prefill_step_size": self._step_size}
        logprobs = self._reference.generated(way.policy, **given)
        return float(self._reference.divergence(logprobs))

    def _kept(self, cache: list) -> np.ndarray:
        counts, n_heads = np.zeros(len(self._tokens)), 0
        for layer in attention_layers(self._model, cache):
            positions = np.array(layer.entries_in(cache).held().positions[0])
            n_heads += len(positions)
            counts += np.bincount(positions.ravel(), minlength=len(counts))[: len(counts)]
        return counts / n_heads

    def _difference(self, tokens: list[int]) -> tuple[int, str, str, str] | None:
        full = self._answered
        if tokens == full:
            return None
        pairs = enumerate(zip(tokens, full))
        i = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(tokens), len(full)))
        before = self._tokenizer.decode(full[max(0, i - AROUND) : i])
        ours, theirs = (self._tokenizer.decode(said[i : i + 1]) for said in (tokens, full))
        return i, before, theirs, ours
