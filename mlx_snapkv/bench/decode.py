"""Decoding speed: the contenders' steps in turn, in one process."""

import statistics
import time
from typing import Any

import mlx.core as mx

from ..caches.layers import attention_layers, members
from ..policies import Policy
from .contenders import Contender, contenders, decoding_cache, entries_bytes

WARM_UP = 3


def measure_decoding(model, context: int, policy: Policy, steps: int) -> list[dict[str, Any]]:
    """One record a contender: its median step after a prompt of `context` tokens, and its entries' bytes."""
    found = []
    for contender in contenders(model, context, policy):
        cache = decoding_cache(model, contender, context)
        if _can_decode(model, cache):
            found.append((contender, cache))
    seconds = _step_in_turn(model, [cache for _, cache in found], steps)
    records = []
    for (contender, cache), times in zip(found, seconds):
        step = statistics.median(times)
        figures = {"steps": steps, "step_seconds": step, "tokens_per_second": 1 / step}
        figures["kv_bytes"] = entries_bytes(cache)
        if contender.kind in ("plain", "snapkv"):
            figures["rollback_seconds"] = _rollback_seconds(model, cache, steps)
        records.append(contender.record(context, **figures))
    del found, cache
    mx.clear_cache()
    return records


def _rollback_seconds(model, cache: list[Any], steps: int) -> float:
    """Of feeding 4 tokens to all layers and taking 3 back, as a draft's check does: the median, attention left out."""
    layers = [
        (layer.cache_in(cache), layer.entries_in(cache)) for layer in attention_layers(model, cache)
    ]
    new = [[mx.zeros_like(x[:, :, :4]) for x in c.keys_and_values()] for c, _ in layers]
    mx.eval(new)
    seconds = []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        for (c, entries), (keys, values) in zip(layers, new):
            entries.mark()
            mx.eval(c.update_and_fetch(keys, values))
            entries.rollback(3)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:])


def requesters(model, context: int, policy: Policy) -> list[Contender]:
    """The contenders that make whole requests: all but the plain cache, which no request leaves behind."""
    return [c for c in contenders(model, context, policy) if c.kind != "plain"]


def _can_decode(model, cache: list[Any]) -> bool:
    """False where mlx-lm can't serve a model from such a cache (quantised entries with attention sinks)."""
    try:
        for _ in range(WARM_UP):
            mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
            _take_back(cache)
    except (ValueError, AttributeError):
        return False
    return True


def _step_in_turn(model, caches: list[list[Any]], steps: int) -> list[list[float]]:
    """Seconds of every step of every cache; who goes first changes with every round."""
    token = mx.zeros((1, 1), mx.int32)
    seconds: list[list[float]] = [[] for _ in caches]
    for step in range(steps):
        for n in range(len(caches)):
            i = (n + step) % len(caches)
            started = time.perf_counter()
            mx.eval(model(token, cache=caches[i]))
            seconds[i].append(time.perf_counter() - started)
            _take_back(caches[i])
    return seconds


def _take_back(cache: list[Any]) -> None:
    """Undo the growth of mlx-lm's caches, so that every step is one over the same entries."""
    for member in members(cache):
        if member.is_trimmable() and not hasattr(member, "max_size"):
            member.trim(1)
