"""The most memory in use while a model reads a prompt, and while it answers."""

from __future__ import annotations

from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache

from ..engine.footprint import EntrySizes, Footprint, total_bytes
from ..engine.prompt_plan import chunk_size, plan_prompt
from ..entries.attention import HELD_BYTES
from ..entries.quantization import Quantization
from ..policies import Policy, Stages
from ..policies.budgets import UNLIMITED
from .shapes import layer_shapes, tables

# Times a layer's keys and values. A growing full cache holds the old ones until they are copied, while the next
# layer's copy has begun. An evicting cache holds float32 keys to score, and the entries kept.
GROWN = 1.25
EVICTED = 3.0


class Peaks:
    """The most memory in use, in bytes, the weights included.

    Args:
        max_tokens: of an answer.
        step_size: tokens of a chunk, at most.
    """

    def __init__(self, model: Any, sizes: EntrySizes, max_tokens: int, step_size: int):
        self._sizes, self._max_tokens, self._step_size = sizes, max_tokens, step_size
        self._shapes = layer_shapes(model, sizes)
        self._vocabulary = max(x.weight.shape[0] for x in tables(model))
        self._widest = max((*sizes.of_token(), *sizes.plain), default=0)
        weights: Any = tree_flatten(model.parameters())
        self.weights = sum(x.nbytes for _, x in weights)

    def reading(self, footprint: Footprint, n_prompt: int, how: Quantization | None) -> int:
        """While a prompt is read, up to its last token, which is read with the answer.

        Args:
            how: as which mlx-lm quantises full caches on the way.
        """
        n, policy = max(1, n_prompt - 1), footprint.policy
        if policy is not None:
            return self.weights + self._reading_by(footprint, policy, n_prompt)
        chunk = min(n, self._step_size)
        start = -(-DEFAULT_QUANTIZED_KV_START // chunk) * chunk
        ends = [(n, None)] if how is None or n <= start else [(start, None), (n, how)]
        return self.weights + max(self._reading_full(end, chunk, how) for end, how in ends)

    def _reading_full(self, end: int, chunk: int, how: Quantization | None) -> int:
        """With full caches, when `end` tokens have been read."""
        copied = int(GROWN * self._widest * end)
        return _rows(end) * self._sizes.full(how) + copied + self._chunks(end, chunk)

    def _reading_by(self, footprint: Footprint, policy: Policy | Stages, n_prompt: int) -> int:
        """With caches that a policy compresses."""
        n, most = max(1, n_prompt - 1), max(footprint.rows_read(n_prompt))
        chunk = min(n, _chunk_size(policy, n_prompt, self._step_size))
        entries = footprint.bytes_read(n_prompt) + sum(self._sizes.plain) * _rows(n)
        if policy.reads_in_blocks:
            entries += int(EVICTED * self._widest * most)
        held = self._chunks(n, chunk, most)
        if any(stage.accumulates_attention for stage in policy.stages):
            held = max(held, self._counting(chunk, most))
        return entries + held

    def answering(self, footprint: Footprint, n_prompt: int, how: Quantization | None) -> int:
        """While an answer is decoded; arguments as of `reading`."""
        need, policy = footprint.need(n_prompt, self._max_tokens), footprint.policy
        if policy is None:
            before, rows = _rows(n_prompt - 1), _rows(n_prompt + self._max_tokens)
            how = how if n_prompt > DEFAULT_QUANTIZED_KV_START else None
            entries = rows * self._sizes.full(how) + self._widest * before * (rows > before)
        else:
            entries = total_bytes(need.row_bytes, [n + self._added(policy, n) for n in need.kept])
        seen = max(need.kept, default=n_prompt)
        held = max(x.held(1, n_prompt, seen) for x in self._shapes)
        logits = 3 * 4 * self._vocabulary  # as they are, normalised, and what is sampled from
        return self.weights + entries + need.rest + logits + held

    def _added(self, policy: Policy | Stages, n: int) -> int:
        """Rows beside `n` for the answer's own entries."""
        last = policy.stages[1]
        if last.keeps_shape:
            return 0
        spare = min(last.block, n // 8)  # as the buffer grows
        return self._max_tokens + spare if last.grows else last.block

    def _chunks(self, n: int, chunk: int, most: int = UNLIMITED) -> int:
        """Bytes held by the last whole chunk, or the rest after it, besides full caches of `most` entries."""
        whole, rest = n - n % chunk, n % chunk
        spans = [(chunk, chunk), (chunk, whole), (rest, n)]
        windows = sum(size * min(n, seen + chunk - 1) for size, seen in self._sizes.sliding)
        held = max(x.held(length, end, most) for x in self._shapes for length, end in spans)
        return held + windows + self._sizes.states

    def _counting(self, chunk: int, rows: int) -> int:
        """Bytes held to sum all queries' attention: that of early chunks is summed in one pass, up to 8 MiB."""
        step = max(x.scores for x in self._shapes) * chunk * min(chunk, rows)
        layers = min(len(self._sizes.layers), 7)  # as many as are under way at once
        passes = HELD_BYTES // step if step else 0
        return int(2.2 * layers * step * min(passes, -(-rows // chunk)))


def _chunk_size(policy: Policy | Stages, n_prompt: int, step_size: int) -> int:
    """Tokens that a policy has read at a time."""
    first, _ = policy.stages
    if policy.reads_in_blocks:
        return min(step_size, first.block)
    votes = any(stage.observes for stage in policy.stages)
    n_before = plan_prompt(policy, n_prompt).first if votes else n_prompt
    return chunk_size(first, step_size, n_prompt, n_before)


def _rows(n: int) -> int:
    """Rows of a full cache of `n` entries."""
    return -(-n // KVCache.step) * KVCache.step
