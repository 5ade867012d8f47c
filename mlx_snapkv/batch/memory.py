"""What requests' caches will take, before they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..caches.adapter import has_all_entries
from ..caches.layers import attention_layers, members, of_layers
from ..engine.decision import decide, gate
from ..engine.report import format_bytes
from ..entries.quantization import Quantization, n_bytes, pack
from ..errors import SnapKVError
from ..policies import Policy, Stages
from ..policies.budgets import UNLIMITED, Quota
from .entries import power_of_two


@dataclass(frozen=True)
class Need:
    """What one request takes at most.

    Attributes:
        reading: bytes that it takes besides, until its prompt has been compressed.
        entries: by layer, what it holds when its answer ends, room for more included.
        row_bytes: by layer, of an entry.
        fixed: it holds so many from the first token to the last.
        rest: bytes of linear states and sliding windows.
    """

    reading: int
    entries: tuple[int, ...]
    row_bytes: tuple[int, ...]
    fixed: bool
    rest: int


class Memory:
    """The KV memory of a batch, from a model's own shapes: one token's caches, of which nothing is computed.

    Args:
        policy: None is full caches, in mlx-lm's one batch.
        quantization: of compressed entries.
        step_size: tokens to read at a time, at most.
        limit: bytes.
    """

    def __init__(
        self,
        model,
        policy: Policy | Stages | None,
        quantization: Quantization | None,
        step_size: int,
        limit: int,
    ):
        self._policy, self.limit = policy, limit
        self._step_size = step_size
        caches = make_prompt_cache(model)
        compressed = [] if policy is None else attention_layers(model, caches)
        model(mx.zeros((1, 1), mx.int32), cache=caches)  # for the shapes: nothing is computed
        stored = [layer.cache_in(caches).keys_and_values() for layer in compressed]
        self._layers = compressed
        self._row_bytes = [n_bytes(entries) for entries in stored]
        self._kept_bytes = [n_bytes([pack(x, quantization) for x in entries]) for entries in stored]
        others = _others(caches, [layer.cache_in(caches) for layer in compressed])
        plain = [cache for cache in others if has_all_entries(cache)]
        self._plain_bytes = [n_bytes(cache.keys_and_values()) for cache in plain]
        sliding: list[Any] = [cache for cache in others if isinstance(cache, RotatingKVCache)]
        self._sliding = [(c.nbytes // c.keys.shape[2], c.max_size) for c in sliding]
        states = [cache for cache in others if cache not in plain and cache not in sliding]
        self._state_bytes = sum(cache.nbytes for cache in states)

    def need(self, n_prompt: int, max_tokens: int) -> Need:
        """What a request takes.

        Raises:
            SnapKVError: it would not fit alone, or the policy can't serve it.
        """
        found = self._need(n_prompt, max_tokens)
        alone = self.together([found], [found])
        if alone > self.limit:
            raise SnapKVError(
                f"its {n_prompt} prompt tokens and {max_tokens} of the answer need {format_bytes(alone)} of KV "
                f"memory, and max_kv_bytes is {format_bytes(self.limit)}: raise it"
            )
        return found

    def _need(self, n_prompt: int, max_tokens: int) -> Need:
        whole = n_prompt + max_tokens + KVCache.step  # by which full caches grow
        rest = self._state_bytes + sum(
            size * min(whole, most + self._step_size) for size, most in self._sliding
        )
        policy = self._policy
        plain = [whole] * len(self._plain_bytes)
        if policy is None or gate(policy, n_prompt, None, max_tokens) is not None:
            entries = [whole] * len(self._row_bytes) + plain
            return Need(0, tuple(entries), (*self._row_bytes, *self._plain_bytes), False, rest)
        _, last = policy.stages
        chosen = [q.entries for q in self._quotas(last.quotas, n_prompt)]
        kept = [_grown(n, last, max_tokens) for n in chosen]
        reading = _bytes(self._row_bytes, self._read(policy, n_prompt))
        reading += _bytes(self._kept_bytes, chosen) - _bytes(self._kept_bytes, kept)
        sizes = (*self._kept_bytes, *self._plain_bytes)
        fixed = last.keeps_shape and not plain
        return Need(max(0, reading), (*kept, *plain), sizes, fixed, rest)

    def _read(self, policy: Policy | Stages, n_prompt: int) -> list[int]:
        """By layer, entries that its prompt is read with."""
        most = n_prompt + decide(policy, n_prompt).n_ahead + 1
        quotas = self._quotas(policy.prefill_quotas, n_prompt)
        if not policy.reads_in_blocks:
            return [most] * len(quotas)
        return [min(most, quota.entries + policy.stages[0].block) for quota in quotas]

    def _quotas(self, quotas: Callable[[int, int], list[Quota]], n_prompt: int) -> list[Quota]:
        """A policy's quotas of the layers here."""
        return of_layers(quotas(n_prompt, self._layers[0].n_layers), self._layers)

    def together(self, needs: Iterable[Need], unread: Iterable[Need]) -> int:
        """Bytes of requests at once, those `unread` among them still to be read: requests of a group have equally
        many rows, as many as the longest."""
        needs = list(needs)
        longest: dict[bool, list[int]] = {}
        for need in needs:
            of_kind = longest.setdefault(need.fixed, [0] * len(need.entries))
            longest[need.fixed] = list(map(max, of_kind, need.entries))
        return sum(need.reading for need in unread) + sum(
            need.rest
            + _bytes(
                need.row_bytes,
                [
                    min(most, self._padded(n, need.fixed))
                    for n, most in zip(need.entries, longest[need.fixed])
                ],
            )
            for need in needs
        )

    def fits(self, new: Need, active: Iterable[tuple[Need, bool]], held: int) -> bool:
        """Whether one more request can be let in; the arguments are those of `with_another`."""
        active = list(active)
        return not active or self.with_another(new, active, held) <= self.limit

    def with_another(self, new: Need, active: Iterable[tuple[Need, bool]], held: int) -> int:
        """Bytes that are taken at most once another request has been let in.

        Args:
            active: what the others need, and whether each is still to be read.
            held: bytes that their caches have now.
        """
        active = list(active)
        needs = [need for need, _ in active]
        unread = [need for need, is_unread in active if is_unread]
        planned = self.together([*needs, new], [*unread, new])
        return max(held + self.together([new], [new]), planned)

    def _padded(self, n: int, fixed: bool) -> int:
        """Rows that a request of `n` entries has in a group, at most."""
        if self._policy is None:
            return UNLIMITED
        return power_of_two(n) if fixed else 2 * power_of_two(n)


def _others(caches: list, compressed: list) -> list[Any]:
    found = {id(cache) for cache in compressed}
    return [cache for cache in members(caches) if id(cache) not in found]


def _grown(n: int, policy: Policy, max_tokens: int) -> int:
    """Rows for `n` entries and the answer's, as far as those stay."""
    if policy.keeps_shape:
        return n
    more = max_tokens if policy.on_full == "grow" else min(max_tokens, policy.answer_block)
    return (n + more) * 3 // 2  # they are made half as many again


def _bytes(sizes: Iterable[int], counts: Iterable[int]) -> int:
    return sum(size * n for size, n in zip(sizes, counts))
