"""Mean keys of pages. Prompt chunks use them to choose which pages to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from ..entries.quantization import Quantization, group_sizes_dividing, pack, slice_rows, unpack
from ..entries.spans import spans
from .full_view import FullView
from .growing_rows import GrowingRows
from .options import PAGE_SIZE


class PageMeans:
    """Mean keys of a layer's first pages. If entries are in files, some of a long text's means are too."""

    _means: GrowingRows | None = None  # None until the first means are computed
    _quantization: Quantization | None = None

    def __len__(self) -> int:
        """Return the number of pages whose means have been computed."""
        return 0 if self._means is None else len(self._means)

    @property
    def in_memory(self) -> tuple[mx.array, ...]:
        """Return the arrays in memory, for the cache's `state`."""
        return () if self._means is None else self._means.in_memory

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the means in memory."""
        return 0 if self._means is None else self._means.nbytes

    @property
    def file_nbytes(self) -> int:
        """Return the size in bytes of the means in a file."""
        return 0 if self._means is None else self._means.spilled_nbytes

    def truncate(self, n: int) -> None:
        """Drop the means of all but the first `n` pages."""
        if self._means is not None:
            self._means.truncate(n)

    def make_readers(self, view: FullView, pages: range) -> list[Callable[[], mx.array]]:
        """Compute any missing means, and return functions that each read the mean keys of some of the `pages`.

        Each function returns `(B, n_kv_heads, n, head_dim)` float32.
        """
        means = self._complete_means(view, pages.stop)

        def read_means(start: int, stop: int) -> mx.array:
            return unpack(means.read(start, stop), self._quantization).astype(mx.float32)

        page_spans = means.spans(pages.start, pages.stop)
        return [partial(read_means, start, stop) for start, stop in page_spans]

    def _complete_means(self, view: FullView, n_pages: int) -> GrowingRows:
        """Compute any missing means of the first `n_pages`, and return all means."""
        n_pages_done = len(self)
        if n_pages_done >= n_pages and self._means is not None:
            return self._means

        def block_means(start: int, stop: int, after: Sequence[mx.array]) -> mx.array:
            return page_means(view.read_keys(start, stop, after))

        new_blocks = spans(n_pages_done * PAGE_SIZE, n_pages * PAGE_SIZE)
        new_means = view.map_blocks(block_means, new_blocks)
        self._quantization = means_quantization(new_means.shape[3])
        packed_means = pack(new_means, self._quantization)
        if self._means is None:
            empty_means = slice_rows(packed_means, 0, 0)
            self._means = GrowingRows(
                empty_means, entries_per_row=PAGE_SIZE, make_spill=view.make_spill
            )
        self._means.append(packed_means)
        return self._means


def page_means(entries: mx.array) -> mx.array:
    """Average entries `(B, n_kv_heads, n, head_dim)` page by page, where `n` is a multiple of `PAGE_SIZE`.

    Sums are float32, because float16 sums could overflow.
    """
    pages = mx.unflatten(entries.astype(mx.float32), 2, (-1, PAGE_SIZE))
    return pages.mean(axis=3).astype(entries.dtype)


def means_quantization(head_dim: int) -> Quantization | None:
    """Return the 8-bit quantisation for mean keys, or None if MLX can't quantise keys of this size."""
    group_sizes = group_sizes_dividing([head_dim])  # ascending
    return Quantization(8, group_size=group_sizes[-1]) if group_sizes else None
