"""The most memory that reading a prompt takes, and decoding its answer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, make_prompt_cache

from ..caches.block import BlockKVCache
from ..caches.layers import attention_layers, members
from ..engine.making import make_request
from ..engine.recalling import Recall
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..policies import Policy, Stages
from .blanks import arrays_of, blank, blanked
from .buffers import Buffer
from .evaluation import Played, backend, play
from .graph import Graph, capture
from .positions import Positions, grown_rows

_MOST_OPERATIONS = 30_000  # of a graph of loops over tokens: some seconds


def reading_peak(
    model: Any,
    n_prompt: int,
    policy: Policy | Stages | None,
    quantization: Quantization | None,
    step_size: int,
) -> int:
    """Bytes, those of the weights included, at the most while a prompt is read up to its last token.

    The last chunks are traced: earlier ones find fewer entries to attend to.

    Raises:
        SnapKVError: the policy reads a prompt twice, or can't serve the model or the prompt.
    """
    n = max(1, n_prompt - 1)  # the last token is read with the answer
    caches, chunk = make_prompt_cache(model), step_size
    loops = operations_of_loops(model)
    recording: contextlib.AbstractContextManager = contextlib.nullcontext()
    spans, traced, first, cycle = [], [], 0, 0
    if policy is not None:
        _require_single(policy)
        request = make_request(model, policy, n_prompt, caches, quantization, Recall())
        caches, chunk, recording = request.caches, request.step_size(step_size), request.recording()
        cycle = policy.stages[0].block // chunk if policy.reads_in_blocks else 0
        if any(stage.accumulates_attention for stage in policy.stages):
            spans = [(0, chunk), (chunk, chunk)]  # which take all their entries at once
    elif quantization is not None and n >= DEFAULT_QUANTIZED_KV_START:
        first = (DEFAULT_QUANTIZED_KV_START - 1) // chunk * chunk
        then = functools.partial(_quantised, quantization=quantization, then=lambda cache: cache)
        plain = Positions(model, caches, chunk)
        traced = [_Chunk(model, plain, first, min(chunk, n - first), loops, then)]
        caches, first = _quantised(caches, quantization), first + chunk
    positions = Positions(model, caches, chunk)
    traced += [
        _Chunk(model, positions, start, length, loops)
        for start, length in [*spans, *_last_spans(n, chunk, cycle)]
        if start >= first and start + length <= n
    ]
    with recording:
        return max(each.peak() for each in traced)


def _require_single(policy: Policy | Stages) -> None:
    """Raises: SnapKVError: the policy reads a prompt twice."""
    name, repeats = policy.stages[1].name, policy.stages[1].repeats
    if repeats is not None:
        raise SnapKVError(
            f"{name} reads a prompt twice, which is not counted: plan with another policy"
        )


def _last_spans(n: int, chunk: int, cycle: int) -> list[tuple[int, int]]:
    """What may take most of `n` tokens: the last whole chunks, and the rest; where each starts and how long it is.

    Args:
        cycle: chunks from one eviction to the next; 0 if nothing is evicted, so that later chunks take more.
    """
    whole, rest = divmod(n, chunk)
    last = [(i * chunk, chunk) for i in range(max(0, whole - max(1, cycle)), whole)]
    left = [(whole * chunk, rest)]
    if not cycle and whole > 2:
        return left if rest * n > whole * chunk * chunk else last  # by the scores of attention
    return last + left if 2 * rest > chunk or not whole else last


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
    caches = Positions(model, make_prompt_cache(model), step_size).at(position)
    if policy is not None:
        _compress(model, caches, n_prompt, max_tokens, policy, quantization)
    elif quantization is not None and n_prompt > DEFAULT_QUANTIZED_KV_START:
        caches = _quantised(caches, quantization)
    recorded = 0 if policy is None else _recorded(model, n_prompt, policy, step_size)
    return recorded + _played(model, caches, 1, lambda logits, mine: [_token(logits)]).most


def _recorded(model: Any, n_prompt: int, policy: Policy | Stages, step_size: int) -> int:
    """Bytes of the queries that stay at hand to vote as the answer goes on."""
    if not policy.stages[1].observes_answer:
        return 0
    request = make_request(model, policy, n_prompt, make_prompt_cache(model), None, Recall())
    chunk = min(n_prompt - 1, request.step_size(step_size))
    with request.recording():
        caches = Positions(model, request.caches, chunk).at(chunk)
    held = [cache for cache in members(caches) if isinstance(cache, BlockKVCache)]
    return sum(x.nbytes for cache in held for x in cache.recorded)


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


@dataclass
class _Chunk:
    """Some tokens of a prompt, from `start` on.

    Attributes:
        n: how many.
        loops: operations for each of them, as of `operations_of_loops`.
        after: what becomes of the caches then.
    """

    model: Any
    positions: Positions
    start: int
    n: int
    loops: int
    after: Callable[[list], list] = list

    def peak(self) -> int:
        """The most bytes while they are read.

        Where a linear layer is a loop over the tokens, for want of a kernel, a long chunk's graph has no end: the
        peaks of two shorter ones then tell its own, to some percent.
        """
        longest = _MOST_OPERATIONS // self.loops if self.loops else self.n
        if self.n <= longest:
            return self._played(self.n, None if self.loops else self._earlier()).most
        n = max(16, longest // 2)
        shorter, short = self._played(n).most, self._played(2 * n).most
        return short + (short - shorter) * (self.n - 2 * n) // n

    def _earlier(self) -> list[tuple[int, Buffer]] | None:
        """What the chunk before has left in the caches, where parts of its own arrays stay for the next one."""
        step = self.positions.chunk
        states = any(isinstance(cache, ArraysCache) for cache in members(self.positions.at(0)))
        if self.start == step or (states and self.start > step):
            before = replace(self, start=self.start - step, n=step, after=list)
            return before._played(step).results
        return None

    def _played(self, n: int, given: list[tuple[int, Buffer]] | None = None) -> Played:
        """The evaluation of only the last `n` of them."""
        caches = self.positions.late(self.start, self.n, n)

        def wanted(logits: mx.array, mine: list) -> list[mx.array]:
            return _states(self.after(mine))

        return _played(self.model, caches, n, wanted, given)


def operations_of_loops(model: Any) -> int:
    """By how many operations the graph of a chunk grows with each token: by none where no layer is a loop."""
    caches = make_prompt_cache(model)
    if not any(isinstance(cache, ArraysCache) for cache in members(caches)):
        return 0
    graphs = [_graph(model, caches, n, lambda logits, mine: _states(mine)) for n in (16, 32)]
    short, longer = (len(graph.made_by) for graph in graphs)
    return (longer - short) // 16


Wanted = Callable[[mx.array, list], list[mx.array]]


def _played(
    model: Any,
    caches: list,
    n: int,
    wanted: Wanted,
    given: list[tuple[int, Buffer]] | None = None,
) -> Played:
    """The evaluation of `n` more tokens, for what is `wanted` of logits and caches."""
    graph = _graph(model, caches, n, wanted)
    return play(graph, backend(), dict(zip(graph.beside, given or ())))


def _graph(model: Any, caches: list, n: int, wanted: Wanted) -> Graph:
    """The graph of it; beside are the states of the caches before, and the logits."""
    weights = arrays_of(model.parameters())

    def build() -> tuple[list[mx.array], list[mx.array], list[mx.array]]:
        mine = [blanked(cache) for cache in caches]
        # The same arrays, but not the objects, which caches change.
        before = [x.astype(x.dtype) for x in _states(cache for cache in mine if not cache.empty())]
        logits = model(blank((1, n), mx.int32), cache=mine)
        return wanted(logits, mine), weights, [*before, logits]

    return capture(build)


def _states(caches: Iterable) -> list[mx.array]:
    """What mlx-lm evaluates of caches."""
    return arrays_of([cache.state for cache in caches])


def _token(logits: mx.array) -> mx.array:
    logits = logits[:, -1, :]
    return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
