"""One request of a batch, up to the compression of its prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import attention_layers, members
from ..caches.memories import lasting_forms, plain_forms, saved_forms
from ..engine.config import CompressionConfig
from ..engine.readers import Request
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import Uncompressed, make_request

BatchReport = Callable[[int, CompressionReport], None]


@dataclass(frozen=True)
class BatchSettings:
    """What all requests of a batch have in common; see `CompressedBatchGenerator` and `make_request`."""

    model: Any
    config: CompressionConfig
    on_report: BatchReport | None
    on_recall: Callable[[int, list, list[int]], None] | None


class Job:
    """What becomes of one prompt's cache, whatever else is in the batch: what becomes of it alone.

    Attributes:
        uid: mlx-lm's number of the request.
        request: how it is read and answered; an `Uncompressed` one once others can decode with it.
        error: what ended the request.
        is_compressed: nothing more is to be done to its caches.
    """

    def __init__(
        self, settings: BatchSettings, uid: int, n_prompt: int, prompt_cache: list, max_tokens: int
    ):
        self.uid, self.model, self._settings = uid, settings.model, settings
        self.error: Exception | None = None
        self._retained: list | None = None  # caches with all entries, to be handed on
        self._unreported: CompressionReport | None = None  # why the prompt is left as it is
        given = copy.deepcopy(prompt_cache)
        wanted = self.model, settings.config, n_prompt, given
        self.request: Request | Uncompressed
        try:
            self.request = make_request(*wanted, max_tokens=max_tokens)
        except Exception as error:
            self.error = error
            self.request = Uncompressed(self.model, given, CompressionReport(NO_POLICY, n_prompt))
        if isinstance(self.request, Request):
            if settings.config.retains:
                self._retained = self.request.prompt_cache
        elif self.error is None:
            self._unreported = self.request.report
            self.request.caches = plain_forms(self.model, given)
        self.is_compressed = self.joins

    @property
    def caches(self) -> list:
        """What mlx-lm is handed; they become compressed."""
        return self.request.caches

    @property
    def joins(self) -> bool:
        """Whether others can decode with it: it is compressed, and not going to be verified."""
        return isinstance(self.request, Uncompressed)

    def begin(self) -> None:
        """Report, once, that the prompt is not going to be compressed."""
        report, self._unreported = self._unreported, None
        if report is not None:
            self._report(report)

    def _report(self, report: CompressionReport) -> None:
        if self._settings.on_report is not None:
            self._settings.on_report(self.uid, report)

    def compress(self, tokens: list[int]) -> None:
        """Compress `caches`, unless they are already; `tokens` have been read."""
        request = self.request
        if self.is_compressed or isinstance(request, Uncompressed):
            return
        report = request.compress()
        self.is_compressed = True
        if self._settings.config.verify is None:  # which goes on reading into them
            self._hand_on(tokens)
            request.end()
            self.request = Uncompressed(self.model, request.caches, report)
        self._report(report)

    def end(self, tokens: list[int]) -> None:
        """The answer has ended, or nobody wants it any more; `tokens` have been read."""
        request = self.request
        if isinstance(request, Request):
            self.request = Uncompressed(self.model, request.caches, request.report)
            if self.is_compressed:
                request.end()
                self._hand_on(tokens)

    def _hand_on(self, tokens: list[int]) -> None:
        """Hand on the caches with all entries, once, unless a call of the model was broken off."""
        caches, self._retained = self._retained, None
        if caches is None or self._settings.on_recall is None:
            return
        layers = attention_layers(self.model, caches)
        n, *more = {layer.entries_in(caches).offset for layer in layers}
        if not more:
            lasting = lasting_forms(self.model, caches, self._settings.config.memory)
            self._settings.on_recall(self.uid, lasting, list(tokens[:n]))

    def extracted(self) -> list:
        """The caches as they are, for others to go on with."""
        caches = saved_forms(self.model, copy.deepcopy(self.caches))
        for cache in members(caches):
            if isinstance(cache, KVCache) and cache.offset:
                # Without the room that there is for the rest of the prompt.
                cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())
        mx.eval([cache.state for cache in caches])
        return caches
