"""The full cache of a prompt that is read once, whose queries are recorded for many policies."""

from collections.abc import Sequence
from typing import Any

from ..caches.recording import RecordingKVCache
from ..entries.queries import Captured


class SharedKVCache(RecordingKVCache):
    """A KV cache whose queries several `recorders` of the layer record, which are never fed; see their `filled`."""

    def __init__(self, recorders: Sequence[RecordingKVCache], capacity: int, layer: Any):
        super().__init__(0, 0, capacity, layer)
        self.recorders = recorders

    def record(self, captured: Captured) -> None:
        for recorder in self.recorders:
            recorder.growing.offset = self.offset
            recorder.record(captured)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        return any(recorder.waits_for_readers for recorder in self.recorders)

    @property  # type: ignore[misc]  # nothing sets the state of a request under way
    def state(self) -> tuple:
        return *super().state, [x.state for x in self.recorders]
