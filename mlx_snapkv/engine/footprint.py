"""What one request's caches take, before it is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..caches.adapter import has_all_entries
from ..caches.layers import attention_layers, members, quotas_of, token_caches
from ..entries.quantization import Quantization, n_bytes, pack
from ..policies import Policy, Stages
from .decision import decide, gate


@dataclass(frozen=True)
class Need:
    """What one request takes at most.

    Attributes:
        reading: bytes that it takes besides, until its prompt has been compressed.
        kept: by layer, what it holds when its prompt has been compressed.
        entries: by layer, what it holds when its answer ends, room for more included.
        row_bytes: by layer, of an entry.
        fixed: it holds so many from the first token to the last.
        rest: bytes of linear states and sliding windows.
    """

    reading: int
    kept: tuple[int, ...]
    entries: tuple[int, ...]
    row_bytes: tuple[int, ...]
    fixed: bool
    rest: int

    @property
    def kv_bytes(self) -> int:
        """Of the entries when the prompt has been compressed."""
        return total_bytes(self.row_bytes, self.kept)


class Footprint:
    """What requests' caches take, from a model's own shapes: one token's caches, of which nothing is computed.

    Args:
        policy: None is full caches.
        quantization: of compressed entries.
        step_size: tokens to read at a time, at most.
    """

    def __init__(
        self,
        model,
        policy: Policy | Stages | None,
        quantization: Quantization | None,
        step_size: int,
    ):
        self.policy = policy
        self._step_size = step_size
        caches = token_caches(model)
        compressed = [] if policy is None else attention_layers(model, caches)
        stored = [layer.cache_in(caches).keys_and_values() for layer in compressed]
        self._layers = compressed
        self._row_bytes = [n_bytes(entries) for entries in stored]
        self._kept_bytes = [n_bytes([pack(x, quantization) for x in entries]) for entries in stored]
        others = _others(caches, [layer.cache_in(caches) for layer in compressed])
        plain = [cache for cache in others if has_all_entries(cache) and not cache.empty()]
        self._plain_bytes = [n_bytes(cache.keys_and_values()) for cache in plain]
        sliding: list[Any] = [cache for cache in others if isinstance(cache, RotatingKVCache)]
        self._sliding = [(c.nbytes // c.keys.shape[2], c.max_size) for c in sliding]
        states = [cache for cache in others if cache not in plain and cache not in sliding]
        self._state_bytes = sum(cache.nbytes for cache in states if not cache.empty())

    def need(self, n_prompt: int, max_tokens: int) -> Need:
        """What a request takes.

        Raises:
            SnapKVError: the policy can't serve it.
        """
        whole = n_prompt + max_tokens + KVCache.step  # by which full caches grow
        rest = self._state_bytes + sum(
            size * min(whole, most + self._step_size) for size, most in self._sliding
        )
        policy = self.policy
        plain = len(self._plain_bytes)
        if policy is None or gate(policy, n_prompt, None, max_tokens) is not None:
            sizes = (*self._row_bytes, *self._plain_bytes)
            n = len(sizes)
            return Need(0, (n_prompt,) * n, (whole,) * n, sizes, False, rest)
        _, last = policy.stages
        quotas = quotas_of(self._layers, last.quotas, n_prompt)
        chosen = [min(n_prompt, quota.entries) for quota in quotas]
        grown = [_grown(n, last, max_tokens, q.n_window) for n, q in zip(chosen, quotas)]
        reading = total_bytes(self._row_bytes, self._read(policy, n_prompt))
        reading += total_bytes(self._kept_bytes, chosen) - total_bytes(self._kept_bytes, grown)
        sizes = (*self._kept_bytes, *self._plain_bytes)
        fixed = last.keeps_shape and not plain
        kept = (*chosen, *[n_prompt] * plain)
        return Need(max(0, reading), kept, (*grown, *[whole] * plain), sizes, fixed, rest)

    def _read(self, policy: Policy | Stages, n_prompt: int) -> list[int]:
        """By layer, entries that its prompt is read with."""
        most = n_prompt + decide(policy, n_prompt).n_ahead + 1
        quotas = quotas_of(self._layers, policy.prefill_quotas, n_prompt)
        if not policy.reads_in_blocks:
            return [most] * len(quotas)
        return [min(most, quota.entries + policy.stages[0].block) for quota in quotas]


def total_bytes(sizes: Iterable[int], counts: Iterable[int]) -> int:
    return sum(size * n for size, n in zip(sizes, counts))


def _others(caches: list, compressed: list) -> list[Any]:
    found = {id(cache) for cache in compressed}
    return [cache for cache in members(caches) if id(cache) not in found]


def _grown(n: int, policy: Policy, max_tokens: int, n_window: int) -> int:
    """Rows for `n` entries and the answer's, as far as those stay."""
    if policy.keeps_shape:
        return n
    more = max_tokens if policy.grows else min(max_tokens, policy.answer_block(n_window))
    return (n + more) * 3 // 2  # they are made half as many again
