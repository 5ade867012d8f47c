"""What one request's caches take, before it is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

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


class EntrySizes:
    """Bytes that a model's caches hold, from its own shapes: one token's caches, of which nothing is computed.

    Attributes:
        caches: those of one token.
        layers: whose entries can be compressed; none unless `compresses`.
        plain: by other full cache, bytes of a token's entries.
        sliding: by sliding window, bytes of a token's entries, and how many it holds.
        states: bytes of linear states.

    Raises:
        UnsupportedModelError: `compresses`, and no layer can be compressed.
    """

    def __init__(self, model, compresses: bool = True):
        self.caches = token_caches(model)
        self.layers = attention_layers(model, self.caches) if compresses else []
        compressed = [layer.cache_in(self.caches) for layer in self.layers]
        self._entries = [cache.keys_and_values() for cache in compressed]
        mine = {id(cache) for cache in compressed}
        others = [c for c in members(self.caches) if id(c) not in mine and not c.empty()]
        windows = [c for c in others if window_of(c) is not None]
        plain = [c for c in others if has_all_entries(c) and window_of(c) is None]
        self.plain = [n_bytes(cache.keys_and_values()) for cache in plain]
        self.sliding = [(c.nbytes // c.keys.shape[2], window_of(c) or 0) for c in windows]
        self.states = sum(c.nbytes for c in others if c not in plain and c not in windows)

    def of_token(self, quantization: Quantization | None = None) -> list[int]:
        """Bytes of a token's entries in each of `layers`, stored as `quantization` says."""
        return [n_bytes([pack(x, quantization) for x in entries]) for entries in self._entries]

    def full(self, quantization: Quantization | None) -> int:
        """Bytes of a token's entries in all full caches; mlx-lm quantises those that are not in a `CacheList`."""
        alone = [c for c in self.caches if isinstance(c, KVCache) and not c.empty()]
        stored = [c.keys_and_values() for c in alone if quantization is not None]
        saved = n_bytes(stored) - n_bytes([pack(x, quantization) for kv in stored for x in kv])
        return sum(self.of_token()) + sum(self.plain) - saved


class Footprint:
    """What requests' caches take.

    Args:
        policy: None is full caches.
        quantization: of compressed entries.
        step_size: tokens to read at a time, at most.
        sizes: of the model, if they are known.
    """

    def __init__(
        self,
        model,
        policy: Policy | Stages | None,
        quantization: Quantization | None,
        step_size: int,
        sizes: EntrySizes | None = None,
    ):
        self.policy = policy
        self._step_size = step_size
        sizes = sizes or EntrySizes(model, compresses=policy is not None)
        self._layers = sizes.layers
        self._row_bytes = sizes.of_token()
        self._kept_bytes = sizes.of_token(quantization)
        self._plain_bytes, self._sliding = sizes.plain, sizes.sliding
        self._state_bytes = sizes.states

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
        reading = self.bytes_read(n_prompt)
        reading += total_bytes(self._kept_bytes, chosen) - total_bytes(self._kept_bytes, grown)
        sizes = (*self._kept_bytes, *self._plain_bytes)
        fixed = last.keeps_shape and not plain
        kept = (*chosen, *[n_prompt] * plain)
        return Need(max(0, reading), kept, (*grown, *[whole] * plain), sizes, fixed, rest)

    def bytes_read(self, n_prompt: int) -> int:
        """Of the entries that the policy chooses, while its prompt is read: where it evicts they are quantised."""
        evicts = self.policy is not None and self.policy.reads_in_blocks
        sizes = self._kept_bytes if evicts else self._row_bytes
        return total_bytes(sizes, self.rows_read(n_prompt))

    def rows_read(self, n_prompt: int) -> list[int]:
        """By layer whose entries the policy chooses, how many its prompt is read with."""
        policy = self.policy
        if policy is None:
            return [n_prompt] * len(self._layers)
        n_ahead = decide(policy, n_prompt).n_ahead
        most = n_prompt + n_ahead + 1
        quotas = quotas_of(self._layers, policy.prefill_quotas, n_prompt)
        if not policy.reads_in_blocks:
            return [most] * len(quotas)
        more = max(policy.stages[0].block, n_ahead)
        return [min(most, quota.entries + more) for quota in quotas]


def total_bytes(sizes: Iterable[int], counts: Iterable[int]) -> int:
    return sum(size * n for size, n in zip(sizes, counts))


def window_of(cache: Any) -> int | None:
    """Entries that a sliding or chunked window holds; None if a cache has none."""
    if isinstance(cache, RotatingKVCache):
        return cache.max_size
    return cache.chunk_size if isinstance(cache, ChunkedKVCache) else None


def _grown(n: int, policy: Policy, max_tokens: int, n_window: int) -> int:
    """Rows for `n` entries and the answer's, as far as those stay."""
    if policy.keeps_shape:
        return n
    more = max_tokens if policy.grows else min(max_tokens, policy.answer_block(n_window))
    return (n + more) * 3 // 2  # they are made half as many again
