"""The mean keys of pages of neighbours, by which the chunks of a prompt choose what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from ..entries.quantization import Quantization, groups_dividing, pack, rows, unpack
from ..entries.spans import spans
from .full_view import FullView
from .held_rows import HeldRows
from .options import PAGE_SIZE


class PageMeans:
    """Mean keys of a layer's first pages; those of a text beyond what stays in memory are in a file, as its entries."""

    _held: HeldRows | None = None  # while there are none
    _held_as: Quantization | None = None

    def __len__(self) -> int:
        return 0 if self._held is None else len(self._held)

    @property
    def in_memory(self) -> tuple[mx.array, ...]:
        return () if self._held is None else self._held.in_memory

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return 0 if self._held is None else self._held.nbytes

    @property
    def file_nbytes(self) -> int:
        return 0 if self._held is None else self._held.aside_nbytes

    def truncate(self, n: int) -> None:
        """Hold those of the first `n` pages only."""
        if self._held is not None:
            self._held.truncate(n)

    def of(self, view: FullView, pages: range) -> list[Callable[[], mx.array]]:
        """Return functions that give the means of these pages of a view, a part of the pages each.

        The means are `(B, n_kv_heads, n, head_dim)` float32.
        """
        held = self._extended(view, pages.stop)
        return [
            partial(self._read, held, start, stop)
            for start, stop in held.spans(pages.start, pages.stop)
        ]

    def _read(self, held: HeldRows, start: int, stop: int) -> mx.array:
        return unpack(held.read(start, stop), self._held_as).astype(mx.float32)

    def _extended(self, view: FullView, stop: int) -> HeldRows:
        """Those of the first `stop` pages, at least."""
        if (done := len(self)) >= stop and self._held is not None:
            return self._held
        new = view.by_block(partial(_of_block, view), spans(done * PAGE_SIZE, stop * PAGE_SIZE))
        self._held_as = means_held_as(new.shape[3])
        packed = pack(new, self._held_as)
        if self._held is None:
            self._held = HeldRows(rows(packed, 0, 0), PAGE_SIZE, view.aside)
        self._held.append(packed)
        return self._held


def _of_block(view: FullView, start: int, stop: int, after: Sequence[mx.array]) -> mx.array:
    return page_means(view.read_keys(start, stop, after))


def page_means(entries: mx.array) -> mx.array:
    """Means of every page of `(B, n_kv_heads, n, head_dim)` entries, whole pages.

    They are summed in float32: of float16, a sum may be too large.
    """
    summed = mx.unflatten(entries.astype(mx.float32), 2, (-1, PAGE_SIZE))
    return summed.mean(axis=3).astype(entries.dtype)


def means_held_as(head_dim: int) -> Quantization | None:
    """How mean keys are held: in 8 bits, half of bfloat16's, unless MLX can't quantise keys of this size."""
    fitting = groups_dividing([head_dim])
    return Quantization(8, fitting[-1]) if fitting else None
