"""Sizes in bytes of a model's KV entries per token, and of its weights."""

from functools import cached_property
from typing import cast

from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from ..caches.adapter import has_all_entries
from ..caches.layers import AttentionLayer, attention_layers, members, token_caches
from ..entries.quantization import Quantization, n_bytes, pack
from ..errors import UnsupportedModelError
from ..sparse.clusters import CLUSTER_SIZE
from ..sparse.growing_rows import ENTRIES_IN_MEMORY
from ..sparse.index import index_bytes
from ..sparse.options import PAGE_SIZE
from ..sparse.page_means import means_quantization
from ..sparse.prompt_caches import in_files, store_quantization
from .shapes import LayerShape, layer_shapes, window_of


class EntrySizes:
    """KV bytes per token, by layer and by kind of cache.

    They are computed from the shapes of caches that contain one token. Nothing is evaluated.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.

    Attributes:
        layers: the layers that can be compressed. If the list is empty, `refusal` says why.
        plain: KV bytes per token for each full cache that can't be compressed.
        sliding: KV bytes per token and window length for each sliding window.
        states: total size in bytes of all linear-attention states.
    """

    def __init__(self, model):
        """Create caches with one token, and classify the layers by their caches."""
        self.model = model
        self.caches = token_caches(model)
        self.layers: list[AttentionLayer] = []
        self.refusal: UnsupportedModelError | None = None
        try:
            self.layers = attention_layers(model, self.caches)
        except UnsupportedModelError as error:
            self.refusal = error
        compressed = [layer.cache_in(self.caches) for layer in self.layers]
        self._entries = [cache.keys_and_values() for cache in compressed]
        compressed_ids = {id(cache) for cache in compressed}
        self.plain: list[int] = []
        self.sliding: list[tuple[int, int]] = []
        self.states = 0
        for cache in members(self.caches):
            if id(cache) in compressed_ids or cache.empty():
                continue
            window = window_of(cache)
            if window is not None:
                self.sliding.append((cache.nbytes // cache.keys.shape[2], window))
            elif has_all_entries(cache):
                self.plain.append(n_bytes(cache.keys_and_values()))
            else:
                self.states += cache.nbytes

    @cached_property
    def shapes(self) -> set[LayerShape]:
        """Return the distinct shapes of the model's layers."""
        return layer_shapes(self.model, self.caches)

    @property
    def of_widest(self) -> int:
        """Return the KV bytes per token of the layer with the largest entries."""
        return max((*self.of_token(), *self.plain), default=0)

    def of_token(self, quantization: Quantization | None = None) -> list[int]:
        """Return the KV bytes per token for each of `layers`, optionally quantised."""
        return [n_bytes([pack(x, quantization) for x in entries]) for entries in self._entries]

    def in_memory(self, store: str | None) -> int:
        """Return the KV bytes per token that a `store` keeps in memory, without the index."""
        return 0 if in_files(store) else self.stored(store)

    def stored(self, store: str | None) -> int:
        """Return the KV bytes per token in a `store`, whether in memory or in files."""
        return sum(self.of_token(store_quantization(self.model, self.layers, store)))

    def of_files(self, store: str | None, n: int) -> int:
        """Return the size of `n` tokens in files: their entries and, for a long text, also index and means."""
        if not in_files(store):
            return 0
        entries = n * self.stored(store)
        if n <= ENTRIES_IN_MEMORY:
            return entries
        return entries + int(n * (self.of_index() + self.of_means()))

    def of_index(self) -> int:
        """Return the bytes per token of the key indexes in all `layers`."""
        return sum(index_bytes(keys) for keys, _ in self._entries)

    def of_means(self) -> float:
        """Return the bytes per token of the mean keys that chunks use to choose pages."""
        means = (pack(keys, means_quantization(keys.shape[-1])) for keys, _ in self._entries)
        return n_bytes(list(means)) / PAGE_SIZE

    def of_clusters(self) -> float:
        """Return the bytes per token of the clusters: each token's cluster id, and its share of the means."""
        ids = sum(2 * keys.shape[1] for keys, _ in self._entries)
        return ids + sum(self.of_token()) / CLUSTER_SIZE

    def full(self, quantization: Quantization | None) -> int:
        """Return the total KV bytes per token of all full caches.

        Args:
            quantization: mlx-lm's quantisation, if any. It does not apply to caches in a `CacheList`.
        """
        unquantised = sum(self.of_token()) + sum(self.plain)
        if quantization is None:
            return unquantised
        entries = [  # each cache contains one token
            cache.keys_and_values()
            for cache in self.caches
            if isinstance(cache, KVCache) and not cache.empty()
        ]
        packed = [pack(array, quantization) for pair in entries for array in pair]
        return unquantised - n_bytes(entries) + n_bytes(packed)

    def rest(self, n: int, chunk: int) -> int:
        """Return the size of linear states and sliding windows after `n` tokens, read in chunks of `chunk` tokens.

        A sliding window's cache contains the window and the current chunk.
        """
        windows = sum(size * min(n, window + chunk) for size, window in self.sliding)
        return self.states + windows


def weight_bytes(model) -> int:
    """Return the total size of a model's weights in bytes."""
    return sum(x.nbytes for _, x in cast(list, tree_flatten(model.parameters())))
