"""What one request's caches take in memory and on disk, before it is read."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from ..caches.adapter import has_all_entries
from ..caches.layers import attention_layers, members, quotas_of, token_caches
from ..caches.memories import in_files, memory_quantization
from ..entries.quantization import Quantization, n_bytes, pack
from ..policies import Policy, Stages
from .prompt_plan import PREFILL_STEP_SIZE, gate, plan_prompt
from .report import format_bytes


@dataclass(frozen=True)
class Need:
    """What one request takes at most.

    Attributes:
        reading: additional bytes until its prompt has been compressed.
        kept: by layer, entries when its prompt has been compressed.
        entries: by layer, rows when its answer ends, room for more included.
        row_bytes: by layer, of an entry.
        fixed: `entries` is constant from the first token to the last.
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

    @property
    def most(self) -> int:
        """Bytes of all caches, at most."""
        return self.reading + total_bytes(self.row_bytes, self.entries) + self.rest


class EntrySizes:
    """Bytes that a model's caches hold, from the shapes of one token's caches, of which nothing is computed.

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
        n_ahead = plan_prompt(policy, n_prompt).n_ahead
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


@dataclass(frozen=True)
class Disk:
    """A folder that entries are written to; bytes that it needs, and that are free."""

    folder: Path
    need: int
    free: int


@dataclass(frozen=True)
class BookCost:
    """What reading a book's tokens out of core will take.

    Attributes:
        tokens: to read.
        resident: entries per KV head in memory, at most of any layer; `resident_bytes` of all layers.
        stored_bytes: of all these tokens' entries, as they are stored: in memory unless there are `disks`.
    """

    tokens: int
    resident: int
    resident_bytes: int
    stored_bytes: int
    disks: tuple[Disk, ...]

    def __str__(self) -> str:
        resident = format_bytes(self.resident_bytes)
        parts = [f"at most {self.resident:,} entries resident ({resident})"]
        if not self.disks:
            parts.append(f"all in memory ({format_bytes(self.stored_bytes)})")
        for disk in self.disks:
            need, free = format_bytes(disk.need), format_bytes(disk.free)
            parts.append(f"{need} on disk in {disk.folder} ({free} free)")
        return f"{self.tokens:,} tokens to read: {', '.join(parts)}"

    @property
    def warnings(self) -> list[str]:
        """What is likely to go wrong, a sentence each."""
        return [
            f"{disk.folder} has not enough room: {format_bytes(disk.need)} are to be written and "
            f"{format_bytes(disk.free)} are free; give --store-dir another folder, fewer bits (recall:file:4bit), or a "
            "shorter text"
            for disk in self.disks
            if disk.need > disk.free
        ]


def book_cost(
    model,
    policy: Policy | Stages | None,
    memory: str,
    n_new: int,
    *,
    n_before: int = 0,
    saved_in: Path | None = None,
) -> BookCost | None:
    """What reading `n_new` tokens will take; None if they are not read out of core.

    Args:
        n_before: tokens that were read and stored before.
        saved_in: the folder that all entries are copied to in the end.
    """
    n_prompt = n_before + n_new
    if policy is None or memory == "drop" or not policy.reads_in_blocks or n_new == 0:
        return None
    if not n_before and gate(policy, n_prompt, None) is not None:
        return None
    sizes = EntrySizes(model)
    rows = Footprint(model, policy, None, PREFILL_STEP_SIZE, sizes).rows_read(n_prompt)
    resident = [min(n_prompt, n) for n in rows]
    stored = n_new * sum(sizes.of_token(memory_quantization(model, sizes.layers, memory)))
    disks: dict[int, Disk] = {}
    for folder in (Path(tempfile.gettempdir()) if in_files(memory) else None, saved_in):
        if folder is not None:
            with contextlib.suppress(OSError):  # some don't say what is free
                device = folder.stat().st_dev
                before = disks.get(device) or Disk(folder, 0, shutil.disk_usage(folder).free)
                disks[device] = Disk(before.folder, before.need + stored, before.free)
    resident_bytes = total_bytes(sizes.of_token(), resident)
    return BookCost(n_new, max(resident), resident_bytes, stored, tuple(disks.values()))
