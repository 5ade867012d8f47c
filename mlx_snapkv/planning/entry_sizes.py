"""Computes the size of a model's weights, and of its KV entries per token, in bytes."""

import contextlib
from functools import cached_property
from typing import cast

from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from ..caches.adapter import has_all_entries
from ..caches.layers import AttentionLayer, all_caches, attention_layers, token_caches
from ..entries.quantization import Quantization, count_bytes, pack
from ..errors import UnsupportedModelError
from ..sparse.clusters import CLUSTER_SIZE, ID_TYPE
from ..sparse.growing_rows import ENTRIES_IN_MEMORY
from ..sparse.index import index_bytes
from ..sparse.options import PAGE_SIZE
from ..sparse.page_means import means_quantization
from ..sparse.prompt_caches import in_files, store_quantization
from .shapes import LayerShape, layer_shapes, window_of


class EntrySizes:
    """KV bytes per token, by layer and by kind of cache.

    The sizes are computed from the shapes of caches that contain one token. Nothing is evaluated.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.

    Attributes:
        layers: the layers that can be compressed.
        sliding_windows: `(KV bytes per token, window length)` for each sliding-window cache.
        state_bytes: total size in bytes of all linear-attention states.
    """

    def __init__(self, model):
        """Create caches with one token, and classify the layers by their caches."""
        self.model = model
        self.caches = token_caches(model)
        self.layers: list[AttentionLayer] = []
        with contextlib.suppress(UnsupportedModelError):
            self.layers = attention_layers(model, self.caches)
        compressible_caches = [layer.cache_in(self.caches) for layer in self.layers]
        # One token's keys and values, for each of `layers`.
        self._entries = [cache.keys_and_values() for cache in compressible_caches]
        compressible_ids = {id(cache) for cache in compressible_caches}
        # KV bytes per token for each full cache that can't be compressed.
        self._incompressible: list[int] = []
        self.sliding_windows: list[tuple[int, int]] = []
        self.state_bytes = 0
        for cache in all_caches(self.caches):
            if id(cache) in compressible_ids or cache.empty():
                continue
            window = window_of(cache)
            if window is not None:
                token_bytes = cache.nbytes // cache.keys.shape[2]
                self.sliding_windows.append((token_bytes, window))
            elif has_all_entries(cache):
                self._incompressible.append(count_bytes(cache.keys_and_values()))
            else:
                self.state_bytes += cache.nbytes

    @cached_property
    def shapes(self) -> set[LayerShape]:
        """Return the distinct shapes of the model's layers."""
        return layer_shapes(self.model, self.caches)

    @property
    def widest_layer_bytes(self) -> int:
        """Return the KV bytes per token of the layer with the largest entries."""
        return max((*self.bytes_by_layer(), *self._incompressible), default=0)

    @property
    def incompressible_bytes(self) -> int:
        """Return the KV bytes per token of all full caches that can't be compressed."""
        return sum(self._incompressible)

    def bytes_by_layer(self, quantization: Quantization | None = None) -> list[int]:
        """Return the KV bytes per token for each of `layers`, with the given quantisation if any."""
        return [
            count_bytes([pack(keys, quantization), pack(values, quantization)])
            for keys, values in self._entries
        ]

    def memory_bytes(self, store: str | None) -> int:
        """Return the KV bytes per token that a `store` keeps in memory, excluding the index."""
        return 0 if in_files(store) else self.store_bytes(store)

    def store_bytes(self, store: str | None) -> int:
        """Return the KV bytes per token in a `store`, whether in memory or in files."""
        return sum(self.bytes_by_layer(store_quantization(self.model, self.layers, store)))

    def file_bytes(self, store: str | None, n_tokens: int) -> int:
        """Return how many bytes `n_tokens` tokens take in files, or 0 if `store` uses no files.

        With more than `ENTRIES_IN_MEMORY` tokens, parts of the index and of the page means (see `page_mean_bytes`) are
        also written to files. In that case, the result includes the whole index and all page means, so it is an upper
        bound.
        """
        if not in_files(store):
            return 0
        entry_bytes = n_tokens * self.store_bytes(store)
        if n_tokens <= ENTRIES_IN_MEMORY:
            return entry_bytes
        return entry_bytes + int(n_tokens * (self.key_index_bytes() + self.page_mean_bytes()))

    def key_index_bytes(self) -> int:
        """Return the bytes per token of the key indexes in all `layers`."""
        return sum(index_bytes(keys) for keys, _ in self._entries)

    def page_mean_bytes(self) -> float:
        """Return the bytes per token of the mean keys by which prompt chunks choose pages."""
        mean_keys = (pack(keys, means_quantization(keys.shape[-1])) for keys, _ in self._entries)
        return count_bytes(list(mean_keys)) / PAGE_SIZE  # one mean key per page

    def cluster_bytes(self) -> float:
        """Return the bytes per token of the clusters: the token's cluster ids, and its share of the cluster means."""
        n_kv_heads = sum(keys.shape[1] for keys, _ in self._entries)
        id_bytes = ID_TYPE.size * n_kv_heads
        return id_bytes + sum(self.bytes_by_layer()) / CLUSTER_SIZE

    def full_cache_bytes(self, quantization: Quantization | None) -> int:
        """Return the total KV bytes per token of all full caches.

        Args:
            quantization: mlx-lm's quantisation, if any. It does not apply to caches in a `CacheList`.
        """
        unquantised_bytes = sum(self.bytes_by_layer()) + self.incompressible_bytes
        if quantization is None:
            return unquantised_bytes
        # (keys, values) of one token, for each cache that mlx-lm would quantise
        quantisable_entries = [
            cache.keys_and_values()
            for cache in self.caches
            if isinstance(cache, KVCache) and not cache.empty()
        ]
        quantised_arrays = [
            pack(array, quantization) for entries in quantisable_entries for array in entries
        ]
        return unquantised_bytes - count_bytes(quantisable_entries) + count_bytes(quantised_arrays)

    def window_and_state_bytes(self, n_tokens: int, chunk_size: int) -> int:
        """Return the size in bytes of linear-attention states and sliding windows after reading `n_tokens` tokens.

        A sliding window's cache contains the window and the current chunk of `chunk_size` tokens.
        """
        window_bytes = sum(
            token_bytes * min(n_tokens, window + chunk_size)
            for token_bytes, window in self.sliding_windows
        )
        return self.state_bytes + window_bytes


def weight_bytes(model) -> int:
    """Return the total size of a model's weights in bytes."""
    parameters = cast(list, tree_flatten(model.parameters()))
    return sum(weights.nbytes for _, weights in parameters)
