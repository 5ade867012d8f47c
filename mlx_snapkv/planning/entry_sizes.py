"""The bytes of a token's entries in a model's caches, and of its weights."""

from functools import cached_property
from typing import cast

from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from ..caches.adapter import has_all_entries
from ..caches.layers import AttentionLayer, attention_layers, members, token_caches
from ..entries.quantization import Quantization, n_bytes, pack
from ..errors import UnsupportedModelError
from ..sparse.clusters import CLUSTER_SIZE
from ..sparse.held_rows import ENTRIES_IN_MEMORY
from ..sparse.index import index_bytes
from ..sparse.options import PAGE_SIZE
from ..sparse.page_means import means_quantization
from ..sparse.prompt_caches import in_files, store_quantization
from .shapes import LayerShape, layer_shapes, window_of


class EntrySizes:
    """Bytes of a token's entries in a model's caches, from the shapes of caches that hold one token.

    Nothing is computed for the shapes.

    Attributes:
        layers: the layers whose entries can be compressed; if there are none, `refusal` says why.
        plain: for each full cache of another layer, the bytes of a token's entries.
        sliding: for each sliding window, the bytes of a token's entries, and the tokens that it holds.
        states: bytes of all linear states.
    """

    def __init__(self, model):
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
        mine = {id(cache) for cache in compressed}
        others = [c for c in members(self.caches) if id(c) not in mine and not c.empty()]
        windows = [c for c in others if window_of(c) is not None]
        plain = [c for c in others if has_all_entries(c) and window_of(c) is None]
        self.plain = [n_bytes(cache.keys_and_values()) for cache in plain]
        self.sliding = [(c.nbytes // c.keys.shape[2], window_of(c) or 0) for c in windows]
        self.states = sum(c.nbytes for c in others if c not in plain and c not in windows)

    @cached_property
    def shapes(self) -> set[LayerShape]:
        """Return the distinct shapes of the model's layers."""
        return layer_shapes(self.model, self.caches)

    @property
    def of_widest(self) -> int:
        """Return the bytes of a token's entries in the layer with the largest."""
        return max((*self.of_token(), *self.plain), default=0)

    def of_token(self, quantization: Quantization | None = None) -> list[int]:
        """Return the bytes of a token's entries in each of `layers`, quantised if asked."""
        return [n_bytes([pack(x, quantization) for x in entries]) for entries in self._entries]

    def in_memory(self, store: str | None) -> int:
        """Return the bytes of a token's entries that a `store` keeps in memory, without an index."""
        return 0 if in_files(store) else self.stored(store)

    def stored(self, store: str | None) -> int:
        """Return the bytes of a token's entries in a `store`, in memory or files."""
        return sum(self.of_token(store_quantization(self.model, self.layers, store)))

    def of_files(self, store: str | None, n: int) -> int:
        """Return the bytes of `n` tokens in files: entries, and for a long text also the index and means."""
        if not in_files(store):
            return 0
        stored = n * self.stored(store)
        return stored + (
            int(n * (self.of_index() + self.of_means())) if n > ENTRIES_IN_MEMORY else 0
        )

    def of_index(self) -> int:
        """Return the bytes of a token in the key indexes of `layers`."""
        return sum(index_bytes(keys) for keys, _ in self._entries)

    def of_means(self) -> float:
        """Return the bytes of a token in the mean keys by which chunks choose pages."""
        means = (pack(keys, means_quantization(keys.shape[-1])) for keys, _ in self._entries)
        return n_bytes(list(means)) / PAGE_SIZE

    def of_clusters(self) -> float:
        """Return the bytes of a token in the clusters of unread entries: its id, and its part of the means."""
        ids = sum(2 * keys.shape[1] for keys, _ in self._entries)
        return ids + sum(self.of_token()) / CLUSTER_SIZE

    def full(self, quantization: Quantization | None) -> int:
        """Return the bytes of a token's entries in all full caches; mlx-lm quantises caches outside a `CacheList`."""
        alone = [c for c in self.caches if isinstance(c, KVCache) and not c.empty()]
        stored = [c.keys_and_values() for c in alone if quantization is not None]
        saved = n_bytes(stored) - n_bytes([pack(x, quantization) for kv in stored for x in kv])
        return sum(self.of_token()) + sum(self.plain) - saved

    def rest(self, n: int, chunk: int) -> int:
        """Return the bytes of linear states and sliding windows after `n` tokens, read `chunk` at a time."""
        return self.states + sum(size * min(n, most + chunk) for size, most in self.sliding)


def weight_bytes(model) -> int:
    return sum(x.nbytes for _, x in cast(list, tree_flatten(model.parameters())))
