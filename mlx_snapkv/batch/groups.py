"""Requests that decode together, in groups whose caches fit each other."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch

from ..caches.layers import layer_caches
from ..errors import SnapKVError
from ..models import attention_classes
from ..models.distributed import n_ranks
from ..models.patch import recording
from .entries import batch_caches, batched, kind_of
from .job import Job


class Guard:
    """A sampler or logits processor whose failure ends its own request only: it then gives what `fallback` makes of the
    last argument, `(1, vocab_size)` logits."""

    error: Exception | None = None

    def __init__(self, function: Callable[..., mx.array], fallback: Callable[[mx.array], mx.array]):
        self._function, self._fallback = function, fallback

    def __call__(self, *args: Any) -> mx.array:
        instead = self._fallback(args[-1])
        if self.error is not None:
            return instead
        try:
            found = self._function(*args)
            if found.shape != instead.shape:
                raise ValueError(f"it gave an array of shape {found.shape}, not {instead.shape}")
        except Exception as error:
            self.error = error
            return instead
        return found


def request_errors() -> type[Exception]:
    """Return the errors of a step that end only its requests: on several Macs, those that all ranks raise."""
    return Exception if n_ranks() == 1 else SnapKVError


class Group(GenerationBatch):
    """mlx-lm's batch of requests that decode; one that fails ends alone, with its error."""

    @dataclass
    class Response(GenerationBatch.Response):
        """mlx-lm's; with the finish reason "error", what was raised. Its token is then none of the answer's."""

        error: Exception | None = None

    joins = True  # others of its kind may come in, and it may join them
    job: Job | None = None  # of a request that can't be joined yet

    @cached_property
    def _attention_classes(self) -> list[type]:
        """Return the attention classes of the model, whose layers are looked up once and not for every token."""
        return attention_classes(self.model)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the model's attention classes for the block, if a request captures queries."""
        observed = any(cache.observes for cache in batch_caches(self.prompt_cache))
        return recording(self._attention_classes if observed else [])

    def next(self) -> list[Any]:
        """The responses of a step. If the model fails, all its requests have; else those whose own part of it has."""
        uids = list(self.uids)
        try:
            with self.recording():
                responses = super().next()
            mx.eval(self._recorded())
        except request_errors() as error:
            self.filter([])
            return [failure(uid, error) for uid in uids]
        return self._without_failed(responses, self._errors(responses))

    def _errors(self, responses: list[Any]) -> dict[int, Exception]:
        """By request, what went wrong with its logits, its sampler or its processors in a step."""
        errors: dict[int, Exception] = {
            r.uid: FloatingPointError("the model gave NaN instead of logits")
            for r in responses
            if _is_nan(r.logprobs)
        }
        for uid, sampler, processors in zip(self.uids, self.samplers, self.logits_processors):  # type: ignore[arg-type]
            for function in (sampler, *processors):
                if isinstance(function, Guard) and function.error is not None:
                    errors[uid] = function.error
        return errors

    def _recorded(self) -> list[Sequence[mx.array]]:
        """What caches have recorded of the step's queries."""
        return [cache.recorded for cache in batch_caches(self.prompt_cache)]

    def extracted(self, idx: int) -> list:
        """A request's caches as they are, for others to go on with."""
        return self.extract_cache(idx)

    def _without_failed(self, responses: list[Any], errors: dict[int, Exception]) -> list[Any]:
        """The responses, of failed requests their errors; those have ended."""
        if errors:
            self.filter([i for i, uid in enumerate(self.uids) if uid not in errors])
        return [failure(r.uid, errors[r.uid]) if r.uid in errors else r for r in responses]


def failure(uid: int, error: Exception) -> Any:
    """The last response of a request that failed."""
    nothing: Any = None
    return Group.Response(uid, -1, nothing, "error", None, None, error)


def _is_nan(logprobs: mx.array) -> bool:
    """Whether log-probabilities that have been computed are NaN: then all of them are."""
    if logprobs.dtype == mx.bfloat16:  # which NumPy has not
        with mx.stream(mx.cpu):  # on the device it would wait for the tokens under way
            return bool(mx.isnan(logprobs[0]).item())
    return bool(np.isnan(np.asarray(logprobs)[0]))


class Single(Group):
    """A request by itself: its prompt is compressed when some tokens of the answer have been fed, or its failure has
    yet to be reported."""

    job: Job
    _n_fed = 0

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self.job.joins

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return self.job.recording()

    def next(self) -> list[Any]:
        """The response of a step, after which the prompt is compressed if it is time."""
        job = self.job
        if job.error is not None:
            self.filter([])
            return [failure(job.uid, job.error)]
        responses = super().next()
        self._n_fed += 1
        if self.uids and not job.joins and self._n_fed >= job.plan.n_ahead:
            try:
                job.compress(self.tokens[0])
                self.model, self.prompt_cache = decoding(job)
            except request_errors() as error:
                return self._without_failed(responses, {job.uid: error})
        return responses

    def _recorded(self) -> list[Sequence[mx.array]]:
        return [cache.recorded for cache in layer_caches(self.prompt_cache)]

    def extract_cache(self, idx: int) -> list:
        """The caches of the answer that has ended, compressed."""
        self.job.compress(self.tokens[idx])
        return list(self.job.caches)

    def extracted(self, idx: int) -> list:
        return self.job.extracted()


def decoding(job: Job) -> tuple[Any, list]:
    """The model and the caches that a request's next token is decoded with."""
    if job.joins:
        return job.model, list(map(batched, job.caches))
    return job.loop_model, job.caches


class Groups:
    """What mlx-lm's `BatchGenerator` takes for its one batch of requests that decode."""

    def __init__(self) -> None:
        self.waits = False  # only requests that are still to be compressed go on
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    @property
    def uids(self) -> list[int]:
        return [uid for group in self._groups for uid in group.uids]

    @property
    def tokens(self) -> list[list[int]]:
        return [tokens for group in self._groups for tokens in group.tokens]

    @property
    def prompt_cache(self) -> list:
        return [cache for group in self._groups for cache in group.prompt_cache]

    def extend(self, group: Group) -> None:
        """Take a group's requests in, among others whose caches fit, unless it is not to be joined yet, or ever."""
        if group.joins:
            kind = kind_of(group.prompt_cache)
            for other in self._groups:
                if other.joins and kind_of(other.prompt_cache) == kind:
                    other.extend(group)
                    return
            alone, group = group, Group.empty(group.model, group.fallback_sampler)
            group.extend(alone)
        self._groups.append(group)

    def next(self) -> list[Any]:
        """The responses of a step of each group."""
        groups = [group for group in self._groups if not (self.waits and group.joins)]
        responses = [response for group in groups for response in group.next()]
        self._settle()
        return responses

    def extract_cache(self, idx: int) -> list:
        group, i = self._place(idx)
        return group.extracted(i)

    def filter(self, keep: list[int]) -> None:
        places = [self._place(idx) for idx in keep]
        for group in self._groups:
            kept = [i for found, i in places if found is group]
            if len(kept) < len(group):
                group.filter(kept)
        self._settle()

    def _place(self, idx: int) -> tuple[Group, int]:
        """The group of the request at `idx`, and where it is in it."""
        return [(group, i) for group in self._groups for i in range(len(group))][idx]

    def _settle(self) -> None:
        """Let go of groups without requests, and let those that have become ready join others."""
        left = [group for group in self._groups if len(group)]
        ready = [group for group in left if isinstance(group, Single) and group.joins]
        self._groups = [group for group in left if group not in ready]
        for group in ready:
            self.extend(group)
