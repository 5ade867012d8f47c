"""The base class for caches that evict entries."""

import json
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache

from ..caches.contract import LayerCache, restorer_of
from ..entries.entries import Entries
from ..entries.quantization import (
    Quantised,
    Quantization,
    Stored,
    count_bytes,
    count_rows,
    flat_arrays,
    pack,
    slice_rows,
)
from ..entries.queries import Recorder
from ..entries.query_moments import QueryMoments


class EvictingCache(Recorder, Quantised, LayerCache, _BaseCache):
    """Base class for caches that evict entries.

    This class manages the buffers `keys` and `values`, whose first `size()` rows hold the entries, and converts the
    cache to and from the `state` that mlx-lm saves. Subclasses define the row order and decide when to evict.

    Attributes:
        keys, values: the buffers, `(B, n_kv_heads, n_rows, head_dim)` each, or the arrays of quantised entries.
        positions: original position of each row's entry, uint32 `(B, n_kv_heads, size())`.
        layer: the cache's `AttentionLayer`, or None if the policy needs only the entries.
    """

    # Names of attributes to save as JSON. All but the first belong to `Recorder`.
    SAVED_NUMBERS: ClassVar[tuple[str, ...]] = (
        "offset",
        "first",
        "last",
        "newest",
        "statistics_from",
        "scale",
        "_stop",
    )

    keys: Any
    values: Any
    is_compressed = stacks = True
    positions: mx.array
    _n_entries = 0  # per KV head

    @abstractmethod
    def append(self, keys: Stored, values: Stored) -> None:
        """Append stored keys and values. If they don't fit, evict entries first."""

    def compact(self) -> None:
        """Prepare for `claim_row`: move entries that are not in their final rows yet. By default, do nothing."""

    @abstractmethod
    def claim_row(self) -> int:
        """Count a new token, and return the row where the caller must write the token's entry.

        `compact` must have been called before.
        """

    def must_evict(self, L: int = 1) -> bool:
        """Return whether entries must be evicted before the next `L` tokens are appended."""
        return False

    def evict(self) -> None:
        """Evict entries to make room for the next tokens."""

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the cache's current state. The function can be called more than once."""
        return super().restorer() if self.grows else restorer_of(self)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Append keys and values `(B, n_kv_heads, L, head_dim)`, and return the stored keys and values to attend to."""
        self.append(pack(keys, self.quantization), pack(values, self.quantization))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """Return the stored keys and values, `(B, n_kv_heads, size(), head_dim)` each."""
        buffers = self.keys, self.values
        is_full = count_rows(buffers) == self._n_entries
        # Don't slice full buffers. The slice would be a second reference, so evictions could not write in place.
        return buffers if is_full else slice_rows(buffers, 0, self._n_entries)

    @property
    def state(self) -> tuple[str, dict[str, Any]]:
        """Return the attributes to save: numbers as a JSON string, and arrays by name.

        The numbers are converted because mlx-lm's files store only strings and arrays.
        """
        saved_arrays = self._saved_arrays()
        arrays = {name: array for name, array in saved_arrays.items() if array is not None}
        return json.dumps(self._saved_numbers()), arrays

    @state.setter
    def state(self, state: tuple[str, dict[str, Any]]) -> None:
        numbers_as_json, arrays = state
        self.start_recording()
        self._restore(json.loads(numbers_as_json), arrays)

    def _saved_numbers(self) -> dict[str, Any]:
        """Return the attributes to save as JSON, by name."""
        return {
            "quantization": None if self.quantization is None else vars(self.quantization),
            "n_counted": self.moments.n_counted,
            "counted_to": self.moments.counted_to,
            "_n": self._n_entries,
            **{name: getattr(self, name) for name in self.SAVED_NUMBERS},
        }

    def _saved_arrays(self) -> dict[str, Any]:
        """Return the attributes to save as arrays, by name. Each is an array, a list or tuple of arrays, or None."""
        return {
            "keys": self.keys,
            "values": self.values,
            "sinks": self.sinks,
            "queries": self._queries,
            "moments": self.moments.sums,
        }

    def _restore(self, numbers: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore the saved attributes. After loading from a file, tuples are lists, and empty lists are missing."""
        quantization_fields = numbers["quantization"]
        if quantization_fields is None:
            self.quantization = None
            self.keys, self.values = arrays["keys"], arrays["values"]
        else:
            self.quantization = Quantization(**quantization_fields)
            # Keys and values are each a tuple of packed numbers, scales and biases.
            self.keys, self.values = tuple(arrays["keys"]), tuple(arrays["values"])
        self.sinks = arrays.get("sinks")
        self._queries = list(arrays.get("queries", []))
        self.moments = QueryMoments(
            sums=list(arrays.get("moments", [])),
            n_counted=numbers["n_counted"],
            counted_to=numbers["counted_to"],
        )
        self._n_entries = numbers["_n"]
        for name in self.SAVED_NUMBERS:
            setattr(self, name, numbers[name])

    def is_trimmable(self) -> bool:
        """Return False, because mlx-lm could trim back to before an eviction, and evicted entries are gone."""
        return False

    def size(self) -> int:
        """Return the number of entries per KV head."""
        return self._n_entries

    def validate(self) -> str | None:
        """Describe what is wrong with a loaded cache, or return None if it is consistent."""
        problem = super().validate()
        if problem is not None:
            return problem
        positions = np.sort(np.array(self.positions).astype(int), axis=-1)
        are_complete = positions.shape[2] == self._n_entries
        are_unique = (np.diff(positions) > 0).all()
        if not are_complete or not are_unique or positions.max() >= self.offset:
            return "has positions that can't be"
        return None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size of the buffers in bytes."""
        return 0 if self.keys is None else count_bytes((self.keys, self.values))

    def empty(self) -> bool:
        """Return whether the cache is empty."""
        return self.keys is None

    @property
    def _batch_and_heads(self) -> tuple[int, ...]:
        """Return the batch size and the number of KV heads."""
        first_array, *_ = flat_arrays(self.keys)
        return first_array.shape[:2]

    def _entries_in_row_order(self, **more_fields: Any) -> Entries:
        """Return the entries in row order. `more_fields` are passed to `Entries`."""
        return Entries(
            *self.keys_and_values(),
            explicit_positions=self.positions,
            quantization=self.quantization,
            layer=self.layer,
            statistics=self.statistics,
            **more_fields,
        )
