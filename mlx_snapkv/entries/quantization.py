"""Store, quantise and slice entries in the format that mlx-lm's quantised attention reads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import Option, SnapKVError

BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)
KV_KEYWORDS = ("kv_bits", "kv_group_size", "quantized_kv_start")  # mlx-lm's keyword arguments

KEYS, VALUES = 0, 1

# A growing buffer is enlarged by an eighth, within these limits.
LEAST_NEW_ROWS = 16
MOST_NEW_ROWS = 256

# Keys or values as a cache stores them: either one array `(B, n_kv_heads, T, head_dim)`, or the packed values, scales
# and biases that `mx.quantize` returns, `(B, n_kv_heads, T, ...)` each.
Stored = Any


@dataclass(frozen=True)
class Quantization:
    """Parameters of `mx.quantize`."""

    bits: int  # bits per value, one of `BITS`
    group_size: int  # number of values that share a scale and a bias; must divide the head size


class Quantised:
    """Base class for caches whose entries may be quantised.

    mlx-lm's attention checks `hasattr(cache, "bits")`, so both properties raise AttributeError for plain entries.
    """

    quantization: Quantization | None

    @property
    def bits(self) -> int:
        """Return the bits per value."""
        return self.quantization.bits  # type: ignore[union-attr]

    @property
    def group_size(self) -> int:
        """Return the number of values that share a scale and a bias."""
        return self.quantization.group_size  # type: ignore[union-attr]


def requested_quantization(mlx_lm_kwargs: dict[str, Any]) -> Quantization | None:
    """Return the quantisation that mlx-lm's keyword arguments request, or None."""
    bits = mlx_lm_kwargs.get("kv_bits")
    if bits is None:
        return None
    return Quantization(bits, group_size=mlx_lm_kwargs.get("kv_group_size", 64))


def without_quantization(mlx_lm_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return mlx-lm's keyword arguments, except those for quantisation."""
    return {name: value for name, value in mlx_lm_kwargs.items() if name not in KV_KEYWORDS}


def pack(entries: mx.array, quantization: Quantization | None) -> Stored:
    """Quantise entries `(B, n_kv_heads, T, head_dim)`, or return them unchanged if `quantization` is None."""
    if quantization is None:
        return entries
    return tuple(mx.quantize(entries, **vars(quantization)))


def unpack(stored: Stored, quantization: Quantization | None) -> mx.array:
    """Dequantise entries to `(B, n_kv_heads, T, head_dim)`, or return them unchanged if `quantization` is None."""
    if quantization is None:
        return stored
    packed, scales, _ = stored
    if packed.shape[2] == 0:  # mx.dequantize does not accept empty arrays
        head_dim = packed.shape[3] * 32 // quantization.bits  # values are packed into 32-bit words
        return mx.zeros((*packed.shape[:3], head_dim), scales.dtype)
    return mx.dequantize(*stored, **vars(quantization))


def flat_arrays(stored: Stored) -> list[mx.array]:
    """Return a flat list of the arrays in stored entries. `stored` can also be a pair of keys and values."""
    if isinstance(stored, mx.array):
        return [stored]
    return [array for part in stored for array in flat_arrays(part)]


def count_rows(stored: Stored) -> int:
    """Return the number of rows in stored entries. `stored` can also be a pair of keys and values."""
    first_array, *_ = flat_arrays(stored)
    return first_array.shape[2]


def count_bytes(stored: Stored) -> int:
    """Return the size of stored entries in bytes. `stored` can also be a pair of keys and values."""
    return sum(array.nbytes for array in flat_arrays(stored))


def map_arrays(function: Callable[..., mx.array], stored: Stored, *others: Stored) -> Stored:
    """Apply `function` to each array of stored entries, along with the corresponding arrays of `others`.

    This runs for every decoded token, and MLX's `tree_map` takes twice as long.
    """
    if isinstance(stored, mx.array):
        return function(stored, *others)
    return tuple(map_arrays(function, *matching_parts) for matching_parts in zip(stored, *others))


def slice_rows(stored: Stored, start: int, stop: int) -> Stored:
    """Slice the rows `[start, stop)` of stored entries."""
    return map_arrays(lambda array: array[:, :, start:stop], stored)


def write_rows(buffers: Stored, rows: int | mx.array, entries: Stored) -> None:
    """Write `entries` into `buffers` in place.

    Args:
        buffers: buffers `(B, n_kv_heads, n_rows, head_dim)`, or their quantised parts.
        rows: row of the first entry, if the rows are consecutive. Otherwise, the row of each entry, uint32 `(n,)`.
        entries: `n` entries, in the same format as the buffers.
    """
    target_rows = slice(rows, rows + count_rows(entries)) if isinstance(rows, int) else rows
    for buffer, new_rows in zip(flat_arrays(buffers), flat_arrays(entries)):
        buffer[..., target_rows, :] = new_rows


def concatenate_rows(*stored: Stored) -> Stored:
    """Concatenate stored entries along the token axis."""
    return map_arrays(lambda *arrays: mx.concatenate(list(arrays), axis=2), *stored)


def with_new_rows(stored: Stored, n_new: int) -> Stored:
    """Return a copy with `n_new` rows of zeros appended."""
    pad_widths = [(0, 0), (0, 0), (0, n_new), (0, 0)]
    return map_arrays(lambda array: mx.pad(array, pad_widths), stored)


def rows_to_allocate(n: int) -> int:
    """Return the number of rows to allocate for `n` entries, trading unused memory for fewer reallocations."""
    n_spare = min(MOST_NEW_ROWS, max(LEAST_NEW_ROWS, n // 8))
    return n + n_spare


def group_sizes_dividing(head_sizes: Iterable[int]) -> list[int]:
    """Return the supported group sizes that divide all of `head_sizes`."""
    head_sizes = set(head_sizes)
    return [
        group_size
        for group_size in GROUP_SIZES
        if all(head_size % group_size == 0 for head_size in head_sizes)
    ]


def fitting_group_sizes(head_sizes: Iterable[int], option: Option) -> list[int]:
    """Return the supported group sizes that divide all of `head_sizes`.

    Raises: SnapKVError: there is no such group size. The message names the user's `option`.
    """
    sorted_sizes = sorted(set(head_sizes))
    group_sizes = group_sizes_dividing(sorted_sizes)
    if not group_sizes:
        raise SnapKVError(
            "{} needs head sizes that are multiples of 32, but this model's are {}: drop it",
            option,
            sorted_sizes,
        )
    return group_sizes
