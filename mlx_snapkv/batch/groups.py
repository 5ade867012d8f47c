"""Decode requests together, in groups whose caches have compatible shapes."""

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
from .caches import batch_caches, batched, kind_of
from .job import Job


class Guard:
    """A sampler or logits processor whose failure ends only its own request, not the others of the batch.

    From its first failure on, a call returns the result of `fallback`, which is called with the last argument, the
    logits `(1, vocab_size)`.

    Args:
        function: the sampler or logits processor.
        fallback: computes the result that the request gets instead, of the same shape.

    Attributes:
        error: the failure; None before it.
    """

    error: Exception | None = None

    def __init__(self, function: Callable[..., mx.array], fallback: Callable[[mx.array], mx.array]):
        """Start without a failure."""
        self._function = function
        self._fallback = fallback

    def __call__(self, *args: Any) -> mx.array:
        """Return the function's result; the result of `fallback` if the function fails or has failed before."""
        fallback = self._fallback(args[-1])
        if self.error is not None:
            return fallback
        try:
            result = self._function(*args)
            if result.shape != fallback.shape:
                raise ValueError(f"it gave an array of shape {result.shape}, not {fallback.shape}")
        except Exception as error:
            self.error = error
            return fallback
        return result


def request_errors() -> type[Exception]:
    """Return the class of errors in a step that end only its requests, for an `except` clause.

    On several Macs, these are the errors that all ranks raise in the same step.
    """
    return Exception if n_ranks() == 1 else SnapKVError


class Group(GenerationBatch):
    """mlx-lm's batch of requests that decode, in which a request that fails ends alone.

    Attributes:
        can_join: whether the group can be joined with another one.
    """

    @dataclass
    class Response(GenerationBatch.Response):
        """mlx-lm's response. With the finish reason "error", `error` is set and the token is not part of the answer."""

        error: Exception | None = None

    can_join = True
    job: Job | None = None

    @cached_property
    def _attention_classes(self) -> list[type]:
        """Return the attention classes of the model, looked up once instead of for every token."""
        return attention_classes(self.model)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the model's attention classes for the block, if a request captures queries."""
        captures_queries = any(cache.observes for cache in batch_caches(self.prompt_cache))
        return recording(self._attention_classes if captures_queries else [])

    def next(self) -> list[Any]:
        """Decode a token of each request, and return the responses.

        If the model fails, all requests of the group fail. If a request's sampler or processor fails, or its logits are
        NaN, only this request fails.
        """
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
        """Return the errors of a step by request: NaN logits, or a failure of its sampler or processors."""
        errors: dict[int, Exception] = {}
        for response in responses:
            if _is_nan(response.logprobs):
                error = FloatingPointError("the model gave NaN instead of logits")
                errors[response.uid] = error
        for uid, sampler, processors in zip(self.uids, self.samplers, self.logits_processors):  # type: ignore[arg-type]
            for function in (sampler, *processors):
                if isinstance(function, Guard) and function.error is not None:
                    errors[uid] = function.error
        return errors

    def _recorded(self) -> list[Sequence[mx.array]]:
        """Return the arrays that the caches recorded of the step's queries."""
        return [cache.recorded for cache in batch_caches(self.prompt_cache)]

    def copy_caches(self, idx: int) -> list:
        """Return copies of a request's caches, from which other requests can continue."""
        return self.extract_cache(idx)

    def _without_failed(self, responses: list[Any], errors: dict[int, Exception]) -> list[Any]:
        """End the requests with errors, and return the responses with a `failure` for each of these requests."""
        if errors:
            self.filter([i for i, uid in enumerate(self.uids) if uid not in errors])
        return [
            failure(response.uid, errors[response.uid]) if response.uid in errors else response
            for response in responses
        ]


def failure(uid: int, error: Exception) -> Any:
    """Return the last response of a request that failed."""
    nothing: Any = None
    return Group.Response(
        uid=uid,
        token=-1,
        logprobs=nothing,
        finish_reason="error",
        prompt_cache=None,
        all_tokens=None,
        error=error,
    )


def _is_nan(logprobs: mx.array) -> bool:
    """Return whether evaluated log-probabilities are NaN; one NaN makes all of them NaN, so one value is checked."""
    if logprobs.dtype == mx.bfloat16:  # NumPy has no bfloat16
        with mx.stream(mx.cpu):  # the GPU's stream would first finish the next tokens
            return bool(mx.isnan(logprobs[0]).item())
    return bool(np.isnan(np.asarray(logprobs)[0]))


class Single(Group):
    """A group of one request that has not joined others: its prompt is to be compressed, or it has failed.

    The prompt is compressed after the first answer tokens, which vote, have been fed.
    """

    job: Job
    _n_fed = 0

    @property
    def can_join(self) -> bool:  # type: ignore[override]
        """Return whether the prompt is compressed, or left to mlx-lm."""
        return self.job.can_join

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the attention classes for the block, if the request captures queries."""
        return self.job.recording()

    def next(self) -> list[Any]:
        """Decode a token, compress the prompt if enough tokens have been fed, and return the response."""
        job = self.job
        if job.error is not None:
            self.filter([])
            return [failure(job.uid, job.error)]
        responses = super().next()
        self._n_fed += 1
        has_all_votes = self._n_fed >= job.plan.n_ahead
        if self.uids and not job.can_join and has_all_votes:
            try:
                job.compress(self.tokens[0])
                self.model, self.prompt_cache = decoding(job)
            except request_errors() as error:
                return self._without_failed(responses, {job.uid: error})
        return responses

    def _recorded(self) -> list[Sequence[mx.array]]:
        """Return the arrays that the request's own caches recorded."""
        return [cache.recorded for cache in layer_caches(self.prompt_cache)]

    def extract_cache(self, idx: int) -> list:
        """Return the caches of a finished request, compressed."""
        self.job.compress(self.tokens[idx])
        return list(self.job.caches)

    def copy_caches(self, idx: int) -> list:
        """Return copies of the request's caches, from which other requests can continue."""
        return self.job.copy_caches()


def decoding(job: Job) -> tuple[Any, list]:
    """Return the model and the caches with which a request's next token is decoded."""
    if job.can_join:
        return job.model, list(map(batched, job.caches))
    return job.loop_model, job.caches


class Groups:
    """All groups of a generator, with the interface of mlx-lm's one `GenerationBatch`.

    Attributes:
        waits: whether only requests whose prompts are not compressed yet decode.
    """

    def __init__(self) -> None:
        """Start without groups."""
        self.waits = False
        self._groups: list[Group] = []

    def __len__(self) -> int:
        """Return the number of requests in all groups."""
        return sum(map(len, self._groups))

    @property
    def uids(self) -> list[int]:
        """Return the numbers of all requests, group by group; indices of other methods refer to this order."""
        return [uid for group in self._groups for uid in group.uids]

    @property
    def tokens(self) -> list[list[int]]:
        """Return for each request the tokens that its caches have read."""
        return [tokens for group in self._groups for tokens in group.tokens]

    @property
    def prompt_cache(self) -> list:
        """Return the caches of all groups, one list after the other."""
        return [cache for group in self._groups for cache in group.prompt_cache]

    def extend(self, group: Group) -> None:
        """Add a group's requests: to a group of the same kind if there is one and both can be joined."""
        if not group.can_join:
            self._groups.append(group)
            return
        kind = kind_of(group.prompt_cache)
        for other in self._groups:
            if other.can_join and kind_of(other.prompt_cache) == kind:
                other.extend(group)
                return
        new = Group.empty(group.model, group.fallback_sampler)
        new.extend(group)
        self._groups.append(new)

    def next(self) -> list[Any]:
        """Decode a step of each group, and return the responses."""
        groups = [group for group in self._groups if not (self.waits and group.can_join)]
        responses = [response for group in groups for response in group.next()]
        self._regroup()
        return responses

    def extract_cache(self, idx: int) -> list:
        """Return copies of the caches of the request at `idx`."""
        group, i = self._locate(idx)
        return group.copy_caches(i)

    def filter(self, keep: list[int]) -> None:
        """Keep only the requests at these indices; groups without requests disappear."""
        kept = [self._locate(idx) for idx in keep]
        for group in self._groups:
            kept_of_group = [i for owner, i in kept if owner is group]
            if len(kept_of_group) < len(group):
                group.filter(kept_of_group)
        self._regroup()

    def _locate(self, idx: int) -> tuple[Group, int]:
        """Return the group of the request at `idx`, and the request's index in the group."""
        places = [(group, i) for group in self._groups for i in range(len(group))]
        return places[idx]

    def _regroup(self) -> None:
        """Drop empty groups, and join requests that have been compressed with others."""
        groups = [group for group in self._groups if len(group)]
        ready = [group for group in groups if isinstance(group, Single) and group.can_join]
        self._groups = [group for group in groups if group not in ready]
        for group in ready:
            self.extend(group)
