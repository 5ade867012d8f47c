"""A plain KV cache that keeps the queries of its own tokens."""

from __future__ import annotations

from mlx_lm.models.cache import KVCache

from ..entries.queries import Recorder


class RecordingKVCache(Recorder, KVCache):
    """A `KVCache` that also keeps the post-RoPE queries of the positions `[first, last)`.

    Args:
        capacity: rows to allocate at once, so that prefill never regrows the buffers.
    """

    def __init__(self, first: int, last: int, capacity: int):
        super().__init__(first, last)
        self.step = capacity

    def observe(self, first: int, last: int, capacity: int) -> None:
        """Go on with other positions, `capacity` tokens in all; the queries kept so far are forgotten."""
        self.start_recording(first, last)
        self.step = max(KVCache.step, capacity - self.offset)

    @property  # type: ignore[misc]  # nothing sets the state of a request under way
    def state(self):
        # mlx-lm's prefill loop evaluates the state, and with it the queries and their statistics.
        return self.keys, self.values, self.offset, self._queries, self._sums
