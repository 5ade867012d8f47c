"""One prompt answered by several methods, each answer beside the full cache's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, kv_bytes
from ..engine.prompt_plan import gate
from ..engine.request import held_tokens
from .answering import Answer, decode
from .divergence import Reference
from .methods import Method
from .reading import read_once

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


def compare(
    model: Any,
    tokenizer: Any,
    tokens: Sequence[int],
    methods: Sequence[Method],
    max_tokens: int,
    on_text: Callable[[str, str], None] = lambda name, text: None,
    **options: Any,
) -> Iterator[Compared]:
    """A prompt's greedy answers, those of `generate`; it is read once for all methods that choose from full caches.

    Args:
        methods: the full cache first, by whose answer the others' are judged.
        max_tokens: of an answer, at most.
        on_text: called with a method's name and its answer's text as it comes.
        **options: `prefill_step_size` and `prompt_progress_callback`, of every reading.

    Raises:
        SnapKVError: as `read_once` does.
    """
    n = len(tokens)
    started = time.perf_counter()
    policies = [method.policy for method in methods if method.shares_reading]
    reading = read_once(model, tokens, policies, **options)
    read_seconds = time.perf_counter() - started

    def answered(method: Method, begun: list[int], kept: Any, **more: Any) -> Compared:
        given = begun[:max_tokens], kept, max_tokens, partial(on_text, method.name)
        answer = decode(model, tokenizer, tokens, *given, **more)
        return _compared(method.name, answer, n, None if more else read_seconds)

    full = answered(methods[0], reading.answer(1), reading.compressed(None))
    yield full
    reference = Reference(reading, full.tokens)
    for method in methods[1:]:
        policy: Any = method.policy
        if (reason := gate(policy, n, None, max_tokens)) is not None:
            on_text(method.name, full.text)
            yield replace(full, name=method.name, reason=reason)
            continue
        held: list[list] = []  # what was kept, before anything is decoded from it
        if method.shares_reading:
            kept = reading.compressed(policy, answering=True)
            held.append(copy.deepcopy(kept[0]))
            found = answered(method, full.tokens[: held_tokens(model, kept[0]) - n + 1], kept)
        else:
            cache = make_prompt_cache(model)
            more = {"policy": policy, **method.options, **options}
            if not method.options:
                more["on_report"] = lambda report: held.append(copy.deepcopy(cache))  # noqa: B023
            found = answered(method, [], (cache, None), **more)
        if held:
            logprobs = reference.predictions(held[0])
        else:  # what the answer's tokens choose, whether or not they are verified
            more = {**method.options, **options, "verify": None, "prompt_progress_callback": None}
            logprobs = reference.generated(policy, **more)
        yield replace(
            found,
            kl=float(reference.figures(logprobs)["kl"]),
            kept=_share_kept(model, held[0], n) if held else None,
            differs=_difference(tokenizer, full.tokens, found.tokens),
        )


def _compared(name: str, answer: Answer, n_prompt: int, read_seconds: float | None) -> Compared:
    times = answer.times[answer.n_before :]
    if read_seconds is None:  # the answer's own: it was asked with a new cache
        read_seconds = answer.times[1] - answer.times[0]
    return Compared(
        name=name,
        text=answer.text,
        tokens=answer.tokens,
        entries=answer.report.entries or n_prompt,
        kv_bytes=answer.report.kv_bytes_after or kv_bytes(answer.cache),
        first_token_seconds=read_seconds,
        tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 2 else None,
    )


def _share_kept(model: Any, cache: list, n: int) -> np.ndarray:
    layers = attention_layers(model, cache)
    held = [np.array(layer.entries_in(cache).held().positions[0]) for layer in layers]
    counts = np.bincount(np.concatenate([rows.ravel() for rows in held]), minlength=n)[:n]
    return counts / sum(map(len, held))


def _difference(
    tokenizer: Any, full: list[int], tokens: list[int]
) -> tuple[int, str, str, str] | None:
    if tokens == full:
        return None
    pairs = enumerate(zip(tokens, full))
    i = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(tokens), len(full)))
    parts = full[max(0, i - BEFORE) : i], full[i : i + 1], tokens[i : i + 1]
    before, theirs, ours = map(tokenizer.decode, parts)
    return i, before, theirs, ours
