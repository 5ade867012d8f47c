"""Quantised entries, in the form that mlx-lm's quantised attention reads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import Option, SnapKVError

BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)
KEYWORDS = ("kv_bits", "kv_group_size", "quantized_kv_start")  # arguments of mlx-lm's functions

KEYS, VALUES = 0, 1

# A buffer without a limit grows by an eighth of its rows, within these bounds.
LEAST_NEW_ROWS = 16
MOST_NEW_ROWS = 256

# Entries as a cache stores them: one array `(B, n_kv_heads, T, head_dim)`, or packed values, scales and biases,
# `(B, n_kv_heads, T, ...)` each, as `mx.quantize` makes them.
Stored = Any


@dataclass(frozen=True)
class Quantization:
    """The bits and the group size of quantised entries."""

    bits: int  # per value, one of `BITS`
    group_size: int  # values that share a scale and a bias; it divides the head size


class Quantised:
    """Base of caches whose entries may be quantised.

    mlx-lm's attention tests `hasattr(cache, "bits")`, so without a quantisation both properties raise AttributeError.
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


def taken_from(options: dict[str, Any]) -> tuple[Quantization | None, dict[str, Any]]:
    """Return the quantisation in mlx-lm's keyword arguments, and the other arguments."""
    quantization = None
    if options.get("kv_bits") is not None:
        quantization = Quantization(
            bits=options["kv_bits"], group_size=options.get("kv_group_size", 64)
        )
    others = {name: value for name, value in options.items() if name not in KEYWORDS}
    return quantization, others


def pack(entries: mx.array, quantization: Quantization | None) -> Stored:
    """Return entries `(B, n_kv_heads, T, head_dim)` in the form in which they are stored."""
    return entries if quantization is None else tuple(mx.quantize(entries, **vars(quantization)))


def unpack(stored: Stored, quantization: Quantization | None) -> mx.array:
    """Return stored entries as the attention sees them, `(B, n_kv_heads, T, head_dim)`."""
    if quantization is None:
        return stored
    packed, scales, _ = stored
    if packed.shape[2] == 0:  # mx.dequantize takes no empty array
        head_dim = packed.shape[3] * 32 // quantization.bits  # values are packed into 32-bit words
        return mx.zeros((*packed.shape[:3], head_dim), scales.dtype)
    return mx.dequantize(*stored, **vars(quantization))


def arrays(stored: Stored) -> list[mx.array]:
    """Return the arrays in which entries are stored; `stored` may also be a pair of keys and values."""
    if isinstance(stored, mx.array):
        return [stored]
    return [array for part in stored for array in arrays(part)]


def n_rows(stored: Stored) -> int:
    """Return the number of rows of stored entries, or of a pair of keys and values."""
    return arrays(stored)[0].shape[2]


def n_bytes(stored: Stored) -> int:
    """Return the bytes of stored entries, or of a pair of keys and values."""
    return sum(array.nbytes for array in arrays(stored))


def each(function: Callable[..., mx.array], stored: Stored, *others: Stored) -> Stored:
    """Return `function` of each array in which entries are stored, called with the same arrays of `others`.

    Every decoded token calls this; MLX's `tree_map` would take twice as long.
    """
    if isinstance(stored, mx.array):
        return function(stored, *others)
    return tuple(each(function, *parts) for parts in zip(stored, *others))


def rows(stored: Stored, start: int, stop: int) -> Stored:
    """Return the stored entries of the rows `[start, stop)`."""
    return each(lambda x: x[:, :, start:stop], stored)


def write(stored: Stored, row: int | mx.array, entries: Stored) -> None:
    """Write `entries` into `stored` in place.

    Args:
        stored: the buffers, `(B, n_kv_heads, rows, head_dim)` or their quantised parts.
        row: the row of the first entry, which the others follow, or uint32 `(n,)`, a row for each of `n` entries.
        entries: `n` entries, stored in the same way as the buffers.
    """
    target = slice(row, row + n_rows(entries)) if isinstance(row, int) else row
    for buffer, new in zip(arrays(stored), arrays(entries)):
        buffer[..., target, :] = new


def join(*stored: Stored) -> Stored:
    """Return the stored entries one after the other, along the axis of entries."""
    return each(lambda *parts: mx.concatenate(list(parts), axis=2), *stored)


def grown(stored: Stored, n_new: int) -> Stored:
    """Return a copy with `n_new` rows of zeros at the end."""
    return each(lambda x: mx.pad(x, [(0, 0), (0, 0), (0, n_new), (0, 0)]), stored)


def with_room(n: int) -> int:
    """Return how many rows to allocate for `n` entries if more will follow: few copies, and little unused memory."""
    n_new = min(MOST_NEW_ROWS, max(LEAST_NEW_ROWS, n // 8))
    return n + n_new


def groups_dividing(head_sizes: Iterable[int]) -> list[int]:
    """Return the group sizes that divide all head sizes."""
    sizes = set(head_sizes)
    return [group for group in GROUP_SIZES if all(size % group == 0 for size in sizes)]


def fitting_groups(head_sizes: Iterable[int], option: Option) -> list[int]:
    """Return the group sizes that divide all head sizes.

    Raises: SnapKVError: no group size does; the message names the user's `option`.
    """
    sizes = sorted(set(head_sizes))
    fitting = groups_dividing(sizes)
    if not fitting:
        raise SnapKVError(
            "{} needs head sizes that are multiples of 32, but this model's are {}: drop it",
            option,
            sizes,
        )
    return fitting
