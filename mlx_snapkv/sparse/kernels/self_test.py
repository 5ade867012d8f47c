"""Before the GPU kernels are used, compare them with the plain path (ordinary MLX operations) on this machine."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from ...entries.attention import HIDDEN_LOGIT
from ...entries.queries import Queries
from ..clusters import Clusters, k_means, mean_by_cluster
from ..index import KeyIndex
from ..residual import Residual
from .launch import Buffer, Means, attend, choose

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
MAX_GROUP = 16  # query heads per KV head
DTYPES = (mx.float16, mx.bfloat16, mx.float32)

# Sizes of the test layer.
N_KV_HEADS, N_PROMPT, N_ANSWER, FREE_ROWS = 2, 4100, 7, 249
N_CHOSEN, N_SINK, CHOICE_STOP, N_CLUSTERS = 300, 4, 4036, 17
HALF_ROUNDING = 2e-3  # relative rounding error of the kernels' half-precision scores
# Maximum difference, relative to the largest value in the plain path's float32 output.
TOLERANCES = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def why_unused(head_dim: int, group: int, dtype: mx.Dtype) -> str | None:
    """Return why the kernels are not used for a shape and dtype, or None if they pass the self-test.

    The test runs once per process for each shape and dtype, and never raises an error.

    Args:
        head_dim: head size of queries, keys and values.
        group: number of query heads per KV head.
        dtype: dtype of queries, keys and values.
    """
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        return "there is no GPU"
    if mx.default_device().type != mx.gpu:
        return "MLX computes on the CPU"
    if head_dim not in HEAD_SIZES:
        return (
            f"heads have {head_dim} channels; the kernels support {', '.join(map(str, HEAD_SIZES))}"
        )
    if not 1 <= group <= MAX_GROUP:
        return f"{group} query heads share a KV head; the kernels support 1 to {MAX_GROUP}"
    if dtype not in DTYPES:
        return f"the kernels do not support {str(dtype).removeprefix('mlx.core.')}"
    return _self_test_failure(head_dim, group, dtype)


@lru_cache(None)
def _self_test_failure(head_dim: int, group: int, dtype: mx.Dtype) -> str | None:
    """Run the self-test, and return why it failed, or None if it passed."""
    try:
        return describe_difference(head_dim, group, dtype)
    except Exception as error:  # raised by the compiler or the device
        message_on_one_line = " ".join(str(error).split())
        message = message_on_one_line or type(error).__name__
        return f"the self-test failed: {message[:300]}"


def describe_difference(head_dim: int, group: int, dtype: mx.Dtype) -> str | None:
    """Compare the kernels with the plain path on random entries. Return how they differ, or None if they agree."""
    case = _Case(head_dim, group, dtype)
    positions, n_unread = choose(
        case.queries,
        case.scale,
        projection=case.projection,
        codes=case.codes,
        powers=case.powers,
        n_chosen=N_CHOSEN,
        n_sink=N_SINK,
        choice_stop=CHOICE_STOP,
        ids=case.residual.clusters.ids,
        choosable=case.residual.choosable,
    )
    assert n_unread is not None
    mx.eval(positions, n_unread)
    with mx.stream(mx.cpu):
        if not case.are_best_positions(positions):
            return "the kernels choose different entries from the plain path"
        if not mx.array_equal(n_unread, case.residual.count_unread(positions)).item():
            return "the kernels count unread entries differently from the plain path"
    output = attend(
        case.queries,
        case.prompt,
        case.answer,
        case.scale,
        n_prompt=N_PROMPT,
        n_entries=N_PROMPT + N_ANSWER,
        n_sink=N_SINK,
        choice_stop=CHOICE_STOP,
        positions=positions,
        means=Means.of(case.residual, n_unread),
        sinks=case.sinks,
    )
    mx.eval(output)
    with mx.stream(mx.cpu):
        expected_output = case.compute_attention(positions)
        largest_difference = mx.abs(output.astype(mx.float32) - expected_output).max()
        largest_number = mx.abs(expected_output).max()
        relative_error = float((largest_difference / largest_number).item())  # type: ignore[arg-type]
    if not relative_error <= TOLERANCES[dtype]:  # true for NaN as well
        return f"the kernels' attention differs from the plain path by {relative_error:.1g} of its largest number"
    return None


class _Case:
    """A token and a layer of random entries. The seed is fixed, so the entries are always the same."""

    def __init__(self, head_dim: int, group: int, dtype: mx.Dtype):
        """Create the queries and the entries, with their index and residual."""
        n_heads = N_KV_HEADS * group
        self.scale = head_dim**-0.5
        seeds = mx.random.split(mx.random.key(73), 7)  # one for each random array
        # Imitate real keys, whose channels differ in magnitude, and whose mean is far from 0.
        channel_sizes = mx.exp(mx.random.normal((1, N_KV_HEADS, 1, head_dim), key=seeds[0]))
        self.queries = mx.random.normal((1, n_heads, 1, head_dim), key=seeds[1]).astype(dtype)
        self.prompt = _random_buffers(channel_sizes, N_PROMPT, dtype, seeds[2])
        self.answer = _random_buffers(channel_sizes, N_ANSWER, dtype, seeds[3])
        keys, values = (buffer[:, :, :N_PROMPT] for buffer in self.prompt)
        index = KeyIndex(keys, self.queries)
        index.append(keys)
        with mx.stream(mx.cpu):  # because GPUs may round the inputs of float32 matrix products
            self._scores = index.relevance(Queries(self.queries, range(1), self.scale), CHOICE_STOP)
        self.codes, self.powers, *_ = index.codes.in_memory
        self.projection = index.query_projection
        ids, mean_keys = k_means(keys, N_CLUSTERS)
        clusters = Clusters(ids, mean_keys, mean_by_cluster(values, ids, N_CLUSTERS))
        shape = 1, N_KV_HEADS, group, 1, 1
        log_mass = mx.random.uniform(-2, 0.5, shape, key=seeds[4])
        log_mass[0, 0, 0] = HIDDEN_LOGIT  # one head has no residual
        temperature = mx.random.uniform(0.5, 1, shape, key=seeds[5])
        choosable = clusters.sizes_between(N_SINK, CHOICE_STOP)
        self.residual = Residual(clusters, choosable, log_mass, temperature)
        self.sinks = mx.random.normal((n_heads,), key=seeds[6])
        mx.eval(vars(self))

    def are_best_positions(self, positions: mx.array) -> bool:
        """Return whether `positions` are ascending and have the highest scores, except for rounding errors."""
        scores_by_head = np.array(self._scores)[0, :, N_SINK:]
        indices_by_head = np.array(positions)[0].astype(np.int64) - N_SINK
        for scores, indices in zip(scores_by_head, indices_by_head):
            are_in_range = indices[0] >= 0 and indices[-1] < scores.size
            are_ascending = (np.diff(indices) > 0).all()
            if not are_in_range or not are_ascending:
                return False
            lowest_chosen = scores[indices].min()
            highest_other = np.delete(scores, indices).max()
            rounding_error = HALF_ROUNDING * (1 - highest_other)  # scores are at most 0
            if highest_other - lowest_chosen > rounding_error:
                return False
        return True

    def compute_attention(self, positions: mx.array) -> mx.array:
        """Compute the attention with the plain path in float32, `(1, n_heads, 1, head_dim)`."""
        queries = self.queries.astype(mx.float32)
        sink_and_window = mx.concatenate([mx.arange(N_SINK), mx.arange(CHOICE_STOP, N_PROMPT)])
        always_read = mx.broadcast_to(
            sink_and_window.astype(mx.uint32), (1, N_KV_HEADS, sink_and_window.size)
        )
        prompt_rows = mx.concatenate([positions, always_read], axis=-1)[..., None]

        def join_parts(means: mx.array, prompt: mx.array, answer: mx.array) -> mx.array:
            prompt_entries = mx.take_along_axis(prompt, prompt_rows, axis=2)
            parts = [means, prompt_entries, answer[:, :, :N_ANSWER]]
            return mx.concatenate(parts, axis=2).astype(mx.float32)

        prompt_keys, prompt_values = self.prompt
        answer_keys, answer_values = self.answer
        clusters = self.residual.clusters
        keys = join_parts(clusters.keys, prompt_keys, answer_keys)
        values = join_parts(clusters.values, prompt_values, answer_values)
        bias = self.residual.bias(queries, self.scale, positions)
        n_entries = keys.shape[2] - clusters.n_clusters
        mask = mx.pad(bias, [(0, 0), (0, 0), (0, 0), (0, n_entries)])
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask, sinks=self.sinks
        )


def _random_buffers(channel_sizes: mx.array, n: int, dtype: mx.Dtype, seed: mx.array) -> Buffer:
    """Return buffers with `n` random entries. Unused rows are NaN, so that the test fails if a kernel reads them."""
    shape = 1, N_KV_HEADS, n, channel_sizes.shape[-1]
    key_seed, value_seed = mx.random.split(seed)
    keys = (mx.random.normal(shape, key=key_seed) + 2) * channel_sizes
    values = mx.random.normal(shape, key=value_seed)
    return _with_unused_rows(keys.astype(dtype)), _with_unused_rows(values.astype(dtype))


def _with_unused_rows(entries: mx.array) -> mx.array:
    """Append rows of NaN."""
    pad_widths = [(0, 0), (0, 0), (0, FREE_ROWS), (0, 0)]
    return mx.pad(entries, pad_widths, constant_values=mx.array(mx.nan, entries.dtype))
