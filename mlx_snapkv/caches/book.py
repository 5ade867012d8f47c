"""The KV cache of a prompt whose entries are all in files, which is saved without reading them into memory."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.key_index import KeyIndex
from ..errors import Missing
from .file_store import FileStore
from .recording import RecordingKVCache

_CLOSED: Any = Missing(
    "this cache came from a file without the entries beside it: load it with mlx_snapkv's saved.load or "
    "Conversation.load",
    cache=None,
)


class BookKVCache(RecordingKVCache):
    """A `RecordingKVCache` with entries in files.

    mlx-lm's `save_prompt_cache` writes the first entry, which shows the shapes, and the index; whoever saves it puts
    the files beside that, and whoever loads it gives it its store.
    """

    store: FileStore  # type: ignore[assignment]
    _loaded: tuple[mx.array, mx.array] | None = (
        None  # the first entry's keys and values, as they came from a file
    )

    def saved_form(self) -> Any:
        self.offload()
        return self

    @property
    def first_entry(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the first entry, `(B, n_kv_heads, 1, head_dim)`."""
        return self._loaded or self.store.entries(0, 1)

    @property
    def state(self) -> tuple:
        """What a request under way computes; between requests, what a file has."""
        if self.growing.offset or (self._loaded is None and not self._n_stored):
            return super().state
        return *self.first_entry, None if self.index is None else self.index.state

    @state.setter
    def state(self, v: Sequence) -> None:
        keys, values, index = v
        self.__init__(0, 0, KVCache.step, None, _CLOSED)  # type: ignore[misc]
        self._loaded = keys, values
        self.index = None if index is None else KeyIndex.restored(index, keys)
