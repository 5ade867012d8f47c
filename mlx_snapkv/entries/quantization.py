"""Store, quantise and slice entries in the format that mlx-lm's quantised attention reads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import Option, SnapKVError

BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)
KEYWORDS = ("kv_bits", "kv_group_size", "quantized_kv_start")  # mlx-lm's keyword arguments

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


def extract_quantization(options: dict[str, Any]) -> tuple[Quantization | None, dict[str, Any]]:
    """Split mlx-lm's keyword arguments into the requested quantisation, or None, and all other arguments."""
    quantization = None
    if options.get("kv_bits") is not None:
        quantization = Quantization(
            bits=options["kv_bits"], group_size=options.get("kv_group_size", 64)
        )
    others = {name: value for name, value in options.items() if name not in KEYWORDS}
    return quantization, others


def pack(entries: mx.array, quantization: Quantization | None) -> Stored:
    """Quantise entries `(B, n_kv_heads, T, head_dim)`, or return them unchanged if `quantization` is None."""
    return entries if quantization is None else tuple(mx.quantize(entries, **vars(quantization)))


def unpack(stored: Stored, quantization: Quantization | None) -> mx.array:
    """Dequantise stored entries to `(B, n_kv_heads, T, head_dim)`."""
    if quantization is None:
        return stored
    packed, scales, _ = stored
    if packed.shape[2] == 0:  # mx.dequantize does not accept empty arrays
        head_dim = packed.shape[3] * 32 // quantization.bits  # values are packed into 32-bit words
        return mx.zeros((*packed.shape[:3], head_dim), scales.dtype)
    return mx.dequantize(*stored, **vars(quantization))


def arrays(stored: Stored) -> list[mx.array]:
    """Return the arrays that make up stored entries, or a pair of keys and values, as a flat list."""
    if isinstance(stored, mx.array):
        return [stored]
    return [array for part in stored for array in arrays(part)]


def n_rows(stored: Stored) -> int:
    """Return the number of rows of stored entries, or of a pair of keys and values."""
    return arrays(stored)[0].shape[2]


def n_bytes(stored: Stored) -> int:
    """Return the size in bytes of stored entries, or of a pair of keys and values."""
    return sum(array.nbytes for array in arrays(stored))


def each(function: Callable[..., mx.array], stored: Stored, *others: Stored) -> Stored:
    """Apply `function` to each array of stored entries, along with the corresponding arrays of `others`.

    This runs for every decoded token, and MLX's `tree_map` takes twice as long.
    """
    if isinstance(stored, mx.array):
        return function(stored, *others)
    return tuple(each(function, *parts) for parts in zip(stored, *others))


def rows(stored: Stored, start: int, stop: int) -> Stored:
    """Slice the rows `[start, stop)` of stored entries."""
    return each(lambda x: x[:, :, start:stop], stored)


def write(stored: Stored, row: int | mx.array, entries: Stored) -> None:
    """Write `entries` into the buffers `stored` in place.

    Args:
        stored: buffers `(B, n_kv_heads, rows, head_dim)`, or their quantised parts.
        row: the first entry's row, or uint32 `(n,)` with a row for each entry.
        entries: `n` entries, in the same format as the buffers.
    """
    target = slice(row, row + n_rows(entries)) if isinstance(row, int) else row
    for buffer, new in zip(arrays(stored), arrays(entries)):
        buffer[..., target, :] = new


def join(*stored: Stored) -> Stored:
    """Concatenate stored entries along the token axis."""
    return each(lambda *parts: mx.concatenate(list(parts), axis=2), *stored)


def with_new_rows(stored: Stored, n_new: int) -> Stored:
    """Return a copy with `n_new` rows of zeros appended."""
    return each(lambda x: mx.pad(x, [(0, 0), (0, 0), (0, n_new), (0, 0)]), stored)


def rows_to_allocate(n: int) -> int:
    """Return the number of rows to allocate for `n` entries, trading unused memory for fewer reallocations."""
    n_new = min(MOST_NEW_ROWS, max(LEAST_NEW_ROWS, n // 8))
    return n + n_new


def groups_dividing(head_sizes: Iterable[int]) -> list[int]:
    """Return the supported group sizes that divide all of `head_sizes`."""
    sizes = set(head_sizes)
    return [group for group in GROUP_SIZES if all(size % group == 0 for size in sizes)]


def fitting_groups(head_sizes: Iterable[int], option: Option) -> list[int]:
    """Return the supported group sizes that divide all of `head_sizes`.

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
