"""Launch the four GPU kernels for a token with sparse attention: score, select, attend and merge.

The kernel bodies compile both as Metal and as CUDA, with `metal.h` and `cuda.h` as their headers. All lengths and
counts are passed in the array `params`, so that kernels are not recompiled when the text grows:

    0 means             4 entries                8 items per split                  11 capacity of codes
    1 chosen entries    5 prompt entries         9 splits                           12 capacity of cluster ids
    2 end of the sink   6 capacity of keys      10 scale, as the bits of a float    13 `score` threadgroups per KV head
    3 choice_stop       7 capacity of own_keys

An item is an entry or a cluster mean that the token reads. The items are divided into splits, which `attend` processes
in parallel. `own_keys` are the answer's keys.

`choose` and `attend` launch kernels and no other MLX operations. They pass the caches' whole buffers, including unused
rows, because MLX would copy a slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from ..residual import Residual

THREADS = {"score": 256, "select": 512, "attend": 256, "merge": 256}  # per threadgroup
SCORE_BLOCK = 1024  # entries per block in `score`
ATTEND_BLOCK = 128  # items per block in `attend`; an item is an entry or a mean
SCORE_GROUPS = 128  # maximum number of threadgroups for `score`; each projects the queries again
MAX_SPLITS = 128  # a token's items are divided into at most this many splits
# Maximum number of cluster means for `select`, which has a counter for each mean in threadgroup memory.
MAX_MEANS = 4096
# Length of `params`. Placeholders for missing inputs have the same length, because MLX puts arrays of fewer than 8
# numbers into Metal's constant memory, and the row pointers in `attend.metal` must point to device memory.
N_PARAMS = 14
NO_SINK = -1e30

INPUTS = {
    "score": ["queries", "projection", "codes", "powers", "params"],
    "select": ["block_maxima", "offsets", "ids", "choosable", "params"],
    "attend": [
        "queries", "keys", "values", "own_keys", "own_values", "mean_keys", "mean_values", "unread", "log_mass",
        "temperature", "positions", "params",
    ],
    "merge": ["partial", "top", "total", "sinks", "params"],
}  # fmt: skip
OUTPUTS: dict[str, dict[str, mx.Dtype | None]] = {
    "score": {"block_maxima": mx.float32, "offsets": mx.float16},
    "select": {"positions": mx.uint32, "unread": mx.uint32, "ranks": mx.uint16},
    "attend": {"partial": mx.float32, "top": mx.float32, "total": mx.float32},
    "merge": {"output": None},  # None means the queries' dtype
}

Buffer = tuple[mx.array, mx.array]  # keys and values `(1, n_kv_heads, capacity, head_dim)`


class Means(NamedTuple):
    """Cluster means, with the counts and factors that set their weights.

    Attributes:
        keys: mean keys `(1, n_kv_heads, n_means, head_dim)`, in the queries' dtype.
        values: mean values, of the same shape and dtype.
        unread: number of unread entries in each cluster, uint32 or int32 `(1, n_kv_heads, n_means)`; see `choose`.
        log_mass: each head's log mass, float32 `(1, n_kv_heads, group, 1, 1)`; see `Residual`.
        temperature: each head's temperature, of the same shape and dtype.
    """

    keys: mx.array
    values: mx.array
    unread: mx.array
    log_mass: mx.array
    temperature: mx.array

    @classmethod
    def of(cls, residual: Residual, unread: mx.array) -> Means:
        """Return a residual's cluster means for a token that leaves `unread` entries of each cluster unread."""
        clusters = residual.clusters
        return cls(clusters.keys, clusters.values, unread, residual.log_mass, residual.temperature)


def choose(
    queries: mx.array,
    scale: float,
    *,
    projection: mx.array,
    codes: mx.array,
    powers: mx.array,
    n_chosen: int,
    n_sink: int,
    choice_stop: int,
    ids: mx.array | None = None,
    choosable: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Choose the highest-scoring entries in `[n_sink, choice_stop)`, and count the unread entries in each cluster.

    Scores match `KeyIndex.relevance`, but in half precision. Ties go to lower positions.

    Args:
        queries: `(1, n_heads, 1, head_dim)`, with the heads of a GQA group adjacent.
        scale: scale of the logits.
        projection: matrix that projects queries to the index's components, float32 `(1, n_kv_heads, head_dim, K)`.
        codes: the index's codes, uint32 `(1, n_kv_heads, capacity, K / 8)`.
        powers: the codes' powers of two, uint8 `(1, n_kv_heads, capacity, K / 32)`.
        n_chosen: number of entries to choose, from 1 to `choice_stop - n_sink`.
        n_sink: number of entries in the sink.
        choice_stop: position after the last entry that can be chosen.
        ids: cluster id of each entry, uint16 `(1, n_kv_heads, n)`, or None without means.
        choosable: number of each cluster's entries in `[n_sink, choice_stop)`, int32 `(1, n_kv_heads, n_means)`, or
            None without means. There can be at most `MAX_MEANS` clusters.

    Returns: ascending positions, uint32 `(1, n_kv_heads, n_chosen)`, and the number of unread entries in each cluster,
        uint32 `(1, n_kv_heads, n_means)`, or None without means.
    """
    shape = Shape.of(queries, codes)
    n_heads, H, _, _ = shape
    n_means = 0 if choosable is None else choosable.shape[2]
    n_blocks = math.ceil(choice_stop / SCORE_BLOCK)
    n_groups = min(n_blocks, max(1, SCORE_GROUPS // H))
    cluster_inputs: list[mx.array | None] = [ids, choosable]
    if choosable is None:
        cluster_inputs = [_placeholder(mx.uint16), _placeholder(mx.int32)]
    params = make_params(
        n_means=n_means,
        n_chosen=n_chosen,
        n_sink=n_sink,
        choice_stop=choice_stop,
        scale=scale,
        code_capacity=codes.shape[2],
        id_capacity=0 if ids is None else ids.shape[2],
        n_score_groups=n_groups,
    )
    scores = run(
        "score", shape, [queries, projection, codes, powers, params], (n_groups, H),
        [(n_heads, n_blocks), (n_heads, choice_stop)],
    )  # fmt: skip
    positions, n_unread, _ = run(
        "select", shape, [*scores, *cluster_inputs, params], (H, 1),
        [(1, H, n_chosen), (1, H, max(1, n_means)), (H, choice_stop)],
    )  # fmt: skip
    return positions, None if choosable is None else n_unread


def attend(
    queries: mx.array,
    prompt: Buffer,
    answer: Buffer,
    scale: float,
    *,
    n_prompt: int,
    n_entries: int,
    n_sink: int,
    choice_stop: int,
    positions: mx.array | None = None,
    means: Means | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to the means, the chosen entries, the sink, the window and the newest entries.

    Args:
        queries: `(1, n_heads, 1, head_dim)`, with the heads of a GQA group adjacent.
        prompt: buffers whose first `n_prompt` rows are the prompt's entries, in the queries' dtype.
        answer: buffers of the entries at or after position `n_prompt`. Ignored if the answer is empty.
        scale: scale of the logits.
        n_prompt: number of entries in the prompt.
        n_entries: total number of entries in prompt and answer.
        n_sink: number of entries in the sink.
        choice_stop: position after the last entry that can be chosen. All entries from here on are read.
        positions: positions of the chosen entries, uint32 `(1, n_kv_heads, n_chosen)`, or None if no entry was chosen.
        means: cluster means, or None to ignore unread entries.
        sinks: logits of attention sinks, `(n_heads,)`.

    Returns: `(1, n_heads, 1, head_dim)` in the queries' dtype.
    """
    shape = Shape.of(queries, prompt[0])
    n_means = 0 if means is None else means.keys.shape[2]
    n_chosen = 0 if positions is None else positions.shape[2]
    n_newest = n_entries - choice_stop
    items_per_split, n_splits = _divide_into_splits(n_means + n_chosen + n_sink + n_newest)
    params = make_params(
        n_means=n_means,
        n_chosen=n_chosen,
        n_sink=n_sink,
        choice_stop=choice_stop,
        n_entries=n_entries,
        n_prompt=n_prompt,
        entry_capacities=(prompt[0].shape[2], answer[0].shape[2]),
        splits=(items_per_split, n_splits),
        scale=scale,
    )
    entries = [*prompt, *answer, *(means or _no_means(queries.dtype))]
    chosen = _placeholder(mx.uint32) if positions is None else positions
    split_shape = shape.n_heads, n_splits
    partial_results = run(
        "attend", shape, [queries, *entries, chosen, params], (n_splits, shape.n_kv_heads),
        [(*split_shape, shape.head_dim), split_shape, split_shape],
    )  # fmt: skip
    sinks = _no_sinks(shape.n_heads) if sinks is None else sinks
    [output] = run(
        "merge", shape, [*partial_results, sinks, params], (shape.n_heads, 1), [queries.shape]
    )
    return output


class Shape(NamedTuple):
    """The shape and dtype of the queries, and the number of KV heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, queries: mx.array, entries: mx.array) -> Shape:
        """Return the shape for queries `(1, n_heads, 1, head_dim)` and entries `(1, n_kv_heads, ...)`."""
        return cls(queries.shape[1], entries.shape[1], queries.shape[3], queries.dtype)


def run(
    name: str,
    shape: Shape,
    inputs: Sequence[mx.array | None],
    groups: tuple[int, int],
    output_shapes: Sequence[tuple[int, ...]],
) -> list[mx.array]:
    """Run a kernel on a grid of `groups` threadgroups, and return its outputs."""
    group_size = shape.n_heads // shape.n_kv_heads
    launch = kernel(name, shape.head_dim, group_size, shape.dtype)
    n_threads = THREADS[name]
    groups_x, groups_y = groups
    return launch(
        inputs=list(inputs),
        output_shapes=output_shapes,
        output_dtypes=[dtype or shape.dtype for dtype in OUTPUTS[name].values()],
        grid=(groups_x * n_threads, groups_y, 1),  # MLX counts threads, not threadgroups
        threadgroup=(n_threads, 1, 1),
    )


@lru_cache(None)
def kernel(name: str, head_dim: int, group: int, dtype: mx.Dtype) -> Callable[..., list[mx.array]]:
    """Build a kernel for the given head size, GQA group size, and dtype of queries and entries."""
    on_cuda = mx.cuda.is_available()
    make_kernel: Any = mx.fast.cuda_kernel if on_cuda else mx.fast.metal_kernel
    kernel_function = make_kernel(
        name=f"snapkv_{name}",
        input_names=INPUTS[name],
        output_names=list(OUTPUTS[name]),
        source=_read_source(f"{name}.metal"),
        header=header(name) + _read_source("cuda.h" if on_cuda else "metal.h"),
        ensure_row_contiguous=True,  # copies non-contiguous views; whole buffers are contiguous
    )
    template = [("T", dtype), ("D", head_dim), ("GROUP", group)]  # names in the kernel's source
    return partial(kernel_function, template=template)


def header(name: str) -> str:
    """Return the `#define` lines for a kernel's constants."""
    constants = {
        "THREADS": THREADS[name],
        "SCORE_BLOCK": SCORE_BLOCK,
        "ATTEND_BLOCK": ATTEND_BLOCK,
        "MAX_MEANS": MAX_MEANS,
    }
    return "".join(f"#define {constant} {value}\n" for constant, value in constants.items())


def _read_source(file_name: str) -> str:
    return Path(__file__).with_name(file_name).read_text()


@lru_cache(256)
def make_params(
    *,
    n_means: int,
    n_chosen: int,
    n_sink: int,
    choice_stop: int,
    scale: float,
    n_entries: int = 0,
    n_prompt: int = 0,
    entry_capacities: tuple[int, int] = (0, 0),
    splits: tuple[int, int] = (0, 0),
    code_capacity: int = 0,
    id_capacity: int = 0,
    n_score_groups: int = 0,
) -> mx.array:
    """Return the kernels' `params` array for one token, in the order listed in the module docstring.

    The result is cached, so that all layers share one array.
    """
    counts = n_means, n_chosen, n_sink, choice_stop, n_entries, n_prompt
    scale_bits = int(np.float32(scale).view(np.uint32))
    index_capacities = code_capacity, id_capacity
    params = [*counts, *entry_capacities, *splits, scale_bits, *index_capacities, n_score_groups]
    return mx.array(np.array(params, np.uint32))


def _divide_into_splits(n_items: int) -> tuple[int, int]:
    """Return the number of items per split (a multiple of `ATTEND_BLOCK`) and the number of splits."""
    blocks_per_split = math.ceil(n_items / (ATTEND_BLOCK * MAX_SPLITS))
    items_per_split = ATTEND_BLOCK * blocks_per_split
    return items_per_split, math.ceil(n_items / items_per_split)


@lru_cache(None)
def _placeholder(dtype: mx.Dtype) -> mx.array:
    """Return a placeholder for an argument that the kernel won't read."""
    return mx.array([0] * N_PARAMS, dtype)


def _no_means(dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Return placeholders for the fields of `Means`."""
    keys = values = _placeholder(dtype)
    log_mass = temperature = _placeholder(mx.float32)
    return keys, values, _placeholder(mx.uint32), log_mass, temperature


@lru_cache(None)
def _no_sinks(n_heads: int) -> mx.array:
    """Return sink logits that are too low to attract attention."""
    return mx.array([NO_SINK] * n_heads, mx.float32)
