"""The most memory that reading a prompt takes, and decoding its answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from ..caches.layers import attention_layers
from ..engine.making import make_request
from ..engine.recalling import Recall
from ..entries.quantization import Quantization
from ..policies import Policy, Stages
from .blanks import arrays_of, blank, blanked
from .evaluation import backend, peak
from .graph import capture
from .positions import at_position, grown_rows


def reading_peak(
    model: Any,
    n_prompt: int,
    policy: Policy | Stages | None,
    quantization: Quantization | None,
    step_size: int,
) -> int:
    """Bytes, those of the weights included, at the most while a prompt is read up to its last token.

    The last chunks are traced: earlier ones find fewer entries to attend to.
    """
    caches = make_prompt_cache(model)
    recording: contextlib.AbstractContextManager = contextlib.nullcontext()
    chunk, peaks = step_size, []
    if policy is not None:
        request = make_request(model, policy, n_prompt, caches, quantization, Recall())
        caches, chunk, recording = request.caches, request.step_size(step_size), request.recording()
    elif quantization is not None and n_prompt > DEFAULT_QUANTIZED_KV_START:
        peaks.append(_while_quantising(model, caches, quantization, chunk))
        caches = _quantised(caches, quantization)
    whole, rest = divmod(n_prompt - 1, chunk)
    last = [((whole - 1) * chunk, chunk)] if whole else []
    last += [(whole * chunk, rest)] if rest else []
    with recording:
        for start, n in last or [(0, 1)]:
            peaks.append(_traced(model, at_position(model, caches, start, chunk), n, _states))
    return max(peaks)


def answering_peak(
    model: Any,
    n_prompt: int,
    max_tokens: int,
    policy: Policy | Stages | None,
    quantization: Quantization | None,
    step_size: int,
) -> int:
    """Bytes, those of the weights included, at the most while an answer is decoded, once its prompt is compressed."""
    rows = grown_rows(n_prompt - 1, step_size)
    position = rows if n_prompt + max_tokens > rows else n_prompt  # where full caches grow
    caches = at_position(model, make_prompt_cache(model), position, step_size)
    if policy is not None:
        _compress(model, caches, n_prompt, max_tokens, policy, quantization)
    elif quantization is not None and n_prompt > DEFAULT_QUANTIZED_KV_START:
        caches = _quantised(caches, quantization)
    return _traced(model, caches, 1, lambda logits, caches: [_token(logits)])


def _compress(
    model: Any,
    caches: list,
    n_prompt: int,
    max_tokens: int,
    policy: Policy | Stages,
    quantization: Quantization | None,
) -> None:
    """Put full caches, of as many rows as the compressed ones have, in the place of those of a whole prompt."""
    _, last = policy.stages
    layers = attention_layers(model, caches)
    more = 0 if last.keeps_shape else last.answer_block
    if last.schedule == "once" and last.on_full == "grow":
        more *= -(-max_tokens // more)
    for layer, quota in zip(layers, last.quotas(n_prompt, len(layers))):
        whole, small = layer.cache_in(caches), KVCache()
        rows = min(n_prompt, quota.entries) + more
        small.keys, small.values = (
            blank((*x.shape[:2], rows, x.shape[3]), x.dtype) for x in (whole.keys, whole.values)
        )
        small.offset = rows - 1
        if quantization is not None:
            small = blanked(small.to_quantized(**vars(quantization)))
        layer.put(caches, small)


def _quantised(
    caches: list, quantization: Quantization, then: Callable[[Any], Any] = blanked
) -> list:
    """As mlx-lm quantises full caches in the middle of a long prompt."""
    made = []
    for cache in caches:
        if isinstance(cache, KVCache):
            how = vars(quantization)
            cache = QuantizedKVCache(**how) if cache.empty() else then(cache.to_quantized(**how))
        made.append(cache)
    return made


def _while_quantising(model: Any, caches: list, quantization: Quantization, chunk: int) -> int:
    """The peak of the chunk after which mlx-lm quantises what has been read."""
    start = (DEFAULT_QUANTIZED_KV_START - 1) // chunk * chunk

    def wanted(logits: mx.array, mine: list) -> list[mx.array]:
        return _states(logits, _quantised(mine, quantization, lambda cache: cache))

    return _traced(model, at_position(model, caches, start, chunk), chunk, wanted)


def _traced(
    model: Any, caches: list, n: int, wanted: Callable[[mx.array, list], list[mx.array]]
) -> int:
    """The peak of reading `n` more tokens, for what is `wanted` of logits and caches."""
    weights = arrays_of(model.parameters())

    def build() -> tuple[list[mx.array], list[mx.array], list[mx.array]]:
        mine = [blanked(cache) for cache in caches]
        logits = model(blank((1, n), mx.int32), cache=mine)
        results = wanted(logits, mine)
        return results, weights, [logits, *_states(logits, mine)]

    return peak(capture(build), backend())


def _states(logits: mx.array, caches: list) -> list[mx.array]:
    """What mlx-lm evaluates after a chunk."""
    return arrays_of([cache.state for cache in caches])


def _token(logits: mx.array) -> mx.array:
    logits = logits[:, -1, :]
    return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
