"""Groups of requests that decode together because their caches have compatible shapes."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch

from ..caches.layers import layer_caches, map_caches
from ..errors import SnapKVError
from ..models import attention_classes, patch
from ..models.distributed import n_ranks
from .caches import batch_of_one, compressed_caches, kind_of
from .job import Job


class Guard:
    """Wraps a sampler or logits processor, so that its failure ends only its own request.

    After a failure, every call returns `fallback(logits)`. The last argument of every call must be the logits, `(1,
    vocab_size)`.

    Args:
        function: the sampler or logits processor.
        fallback: computes a substitute result. Results of `function` must have the same shape.

    Attributes:
        error: the exception that `function` raised, or None.
    """

    error: Exception | None = None

    def __init__(self, function: Callable[..., mx.array], fallback: Callable[[mx.array], mx.array]):
        """Wrap the function."""
        self._function = function
        self._fallback = fallback

    def __call__(self, *args: Any) -> mx.array:
        """Call the function, or `fallback` if the function fails or has failed before."""
        *_, logits = args
        fallback_result = self._fallback(logits)
        if self.error is not None:
            return fallback_result
        try:
            result = self._function(*args)
            expected_shape = fallback_result.shape
            if result.shape != expected_shape:
                raise ValueError(f"it gave an array of shape {result.shape}, not {expected_shape}")
        except Exception as error:
            self.error = error
            return fallback_result
        return result


def request_errors() -> type[Exception]:
    """Return the exception type to catch around a step, so that an error ends only the requests in that step.

    If several Macs share the model, catch only SnapKVErrors, because nearly all of them, such as those about invalid
    options, are raised by all ranks in the same step. Any other exception may leave the other ranks waiting in the
    middle of a model call.
    """
    return Exception if n_ranks() == 1 else SnapKVError


class Group(GenerationBatch):
    """A version of mlx-lm's decoding batch in which requests can fail individually.

    Attributes:
        can_join: whether the group can be merged with another one.
    """

    @dataclass
    class Response(GenerationBatch.Response):
        """mlx-lm's response, extended with an error.

        If the finish reason is "error", `error` is set and the token is not part of the answer.
        """

        error: Exception | None = None

    can_join = True

    @cached_property
    def _attention_classes(self) -> list[type]:
        """Return the model's attention classes."""
        return attention_classes(self.model)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the attention classes within the `with` block if any request records queries."""
        captures_queries = any(cache.observes for cache in compressed_caches(self.prompt_cache))
        return patch.recording(self._attention_classes if captures_queries else [])

    def next(self) -> list[Any]:
        """Decode one token per request, and return the responses.

        If the model fails, all requests in the group fail. If a sampler or logits processor fails, or if logits are
        NaN, only the affected request fails.
        """
        uids = list(self.uids)
        try:
            with self.recording():
                responses = super().next()
            mx.eval(self._recorded_arrays())
        except request_errors() as error:
            self.filter([])
            return [failure(uid, error) for uid in uids]
        return self._without_failed(responses, self._errors_by_uid(responses))

    def _errors_by_uid(self, responses: list[Any]) -> dict[int, Exception]:
        """Return a step's errors by uid: NaN logits, and failed samplers or logits processors."""
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

    def _recorded_arrays(self) -> list[Sequence[mx.array]]:
        """Return the arrays that were recorded in this step."""
        return [cache.recorded for cache in compressed_caches(self.prompt_cache)]

    def copy_caches(self, idx: int) -> list:
        """Copy a request's caches, so that other requests can continue from the copies."""
        return self.extract_cache(idx)

    def _without_failed(self, responses: list[Any], errors: dict[int, Exception]) -> list[Any]:
        """Drop the requests with errors, and replace their responses with failures."""
        if errors:
            self.filter([i for i, uid in enumerate(self.uids) if uid not in errors])
        return [
            failure(response.uid, errors[response.uid]) if response.uid in errors else response
            for response in responses
        ]


def failure(uid: int, error: Exception) -> Any:
    """Create the last response for a failed request."""
    no_logprobs: Any = None
    return Group.Response(
        uid=uid,
        token=-1,
        logprobs=no_logprobs,
        finish_reason="error",
        prompt_cache=None,
        all_tokens=None,
        error=error,
    )


def _is_nan(logprobs: mx.array) -> bool:
    """Return whether evaluated log-probabilities are NaN.

    Checking one value is enough, because a single NaN logit makes all log-probabilities NaN.
    """
    if logprobs.dtype == mx.bfloat16:  # NumPy has no bfloat16
        with mx.stream(
            mx.cpu
        ):  # avoid waiting for the GPU, which is already computing the next tokens
            return bool(mx.isnan(logprobs[0]).item())
    return bool(np.isnan(np.asarray(logprobs)[0]))


class Single(Group):
    """A group of a single request, which has failed or has not joined other requests yet.

    The prompt is compressed once the model has read the first answer token and all answer tokens whose queries vote;
    see `Plan.voters`.
    """

    job: Job
    _n_fed = 0

    @property
    def can_join(self) -> bool:  # type: ignore[override]
        """Return whether the request can decode with others; see `Job.can_join`."""
        return self.job.can_join

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the attention classes within the `with` block if the request records queries."""
        return self.job.recording()

    def next(self) -> list[Any]:
        """Decode one token, and return the response. Compress the prompt once all queries that vote are recorded."""
        job = self.job
        if job.error is not None:
            self.filter([])
            return [failure(job.uid, job.error)]
        responses = super().next()
        self._n_fed += 1
        has_all_votes = self._n_fed >= job.plan.n_fed_before_compression
        if self.uids and not job.can_join and has_all_votes:
            try:
                job.compress(self.tokens[0])
                self.model, self.prompt_cache = model_and_caches(job)
            except request_errors() as error:
                return self._without_failed(responses, {job.uid: error})
        return responses

    def _recorded_arrays(self) -> list[Sequence[mx.array]]:
        """Return the arrays that were recorded in this step."""
        return [cache.recorded for cache in layer_caches(self.prompt_cache)]

    def extract_cache(self, idx: int) -> list:
        """Compress a finished request's caches if necessary, and return them."""
        self.job.compress(self.tokens[idx])
        return list(self.job.caches)

    def copy_caches(self, idx: int) -> list:
        """Copy the request's caches, so that other requests can continue from the copies."""
        return self.job.copy_caches()


def model_and_caches(job: Job) -> tuple[Any, list]:
    """Return the model and the caches for a request's next token."""
    if job.can_join:
        return job.model, map_caches(batch_of_one, job.caches)
    return job.loop_model, job.caches


class Groups:
    """All groups of a generator, behind the interface of a single mlx-lm `GenerationBatch`.

    Attributes:
        only_uncompressed: whether to decode only requests whose prompts must still be compressed.
    """

    def __init__(self) -> None:
        """Start with no groups."""
        self.only_uncompressed = False
        self._groups: list[Group] = []

    def __len__(self) -> int:
        """Return the number of requests in all groups."""
        return sum(map(len, self._groups))

    @property
    def uids(self) -> list[int]:
        """Return the uids of all requests, group by group. Indices in other methods refer to this order."""
        return [uid for group in self._groups for uid in group.uids]

    @property
    def tokens(self) -> list[list[int]]:
        """Return the tokens in each request's caches."""
        return [tokens for group in self._groups for tokens in group.tokens]

    @property
    def prompt_cache(self) -> list:
        """Return the caches of all groups as one list."""
        return [cache for group in self._groups for cache in group.prompt_cache]

    def extend(self, group: Group) -> None:
        """Merge a group into an existing one of the same kind if possible, otherwise add it as a new group."""
        if not group.can_join:
            self._groups.append(group)
            return
        kind = kind_of(group.prompt_cache)
        for other in self._groups:
            if other.can_join and kind_of(other.prompt_cache) == kind:
                other.extend(group)
                return
        new_group = Group.empty(group.model, group.fallback_sampler)
        new_group.extend(group)
        self._groups.append(new_group)

    def next(self) -> list[Any]:
        """Decode one token per request, group by group, and return the responses."""
        groups = self._groups
        if self.only_uncompressed:
            groups = [group for group in groups if not group.can_join]
        responses = [response for group in groups for response in group.next()]
        self._regroup()
        return responses

    def extract_cache(self, idx: int) -> list:
        """Copy the caches of the request at index `idx`."""
        group, i = self._locate(idx)
        return group.copy_caches(i)

    def filter(self, keep: list[int]) -> None:
        """Keep only the requests at the indices `keep`, and drop empty groups."""
        kept_places = [self._locate(idx) for idx in keep]
        for group in self._groups:
            kept_indices = [i for owner, i in kept_places if owner is group]
            if len(kept_indices) < len(group):
                group.filter(kept_indices)
        self._regroup()

    def _locate(self, idx: int) -> tuple[Group, int]:
        """Return the group of the request at index `idx`, and the request's index within the group."""
        places = [(group, i) for group in self._groups for i in range(len(group))]
        return places[idx]

    def _regroup(self) -> None:
        """Drop empty groups, and let requests whose prompts were just compressed join other groups."""
        non_empty = [group for group in self._groups if len(group) > 0]
        joining = [group for group in non_empty if isinstance(group, Single) and group.can_join]
        self._groups = [group for group in non_empty if group not in joining]
        for group in joining:
            self.extend(group)
