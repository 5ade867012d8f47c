"""The prompt of a batch that is being read: one at a time."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch

from .entries import batched
from .groups import Failed, Group, Single, of_all_ranks, request_errors
from .job import Job


class Reading(PromptProcessingBatch):
    """mlx-lm's batch of prompts, which holds one or none.

    Several read together would need the memory of all their full caches at once, and, padded to the longest, more
    time than one after the other.
    """

    job: Job

    @classmethod
    def of(cls, job: Job, prefill_step_size: int, **sequence: Any) -> Reading:
        """A batch of one prompt; `sequence` is what mlx-lm keeps of it, in lists of one."""
        errors = {} if job.error is None else {job.uid: job.error}
        job.error = of_all_ranks(job.model, errors).get(job.uid)
        batch = cls(job.loop_model, [job.uid], [], prefill_step_size=prefill_step_size, **sequence)
        batch.job, batch.prompt_cache = job, job.caches
        return batch

    def extend(self, batch: Any) -> None:
        """Take over the prompt of another one; this one is empty."""
        assert not self.uids, "prompts are read one at a time"
        vars(self).update(vars(batch))

    def split(self, indices: list[int]) -> Reading:
        """The prompt in a batch of its own, without the copy that mlx-lm makes; this one is empty then."""
        batch = copy.copy(self)
        self.filter([i for i in range(len(self)) if i not in indices])
        return batch

    def filter(self, keep: list[int]) -> None:
        if not keep:
            self.prompt_cache = []  # a list that is the request's is not cleared
        super().filter(keep)

    def prompt(self, tokens: list[list[int]]) -> None:
        """Read on; a request that fails says so when it is to generate."""
        if not tokens or self.job.error is not None:
            return
        try:
            self.job.begin()
            with self.job.recording():
                super().prompt(tokens)
        except request_errors(self.job.model) as error:
            self.job.error = error

    def generate(self, tokens: list[list[int]]) -> Group:
        """The request, ready to generate, its prompt's last token read."""
        job = self.job
        if job.error is None:
            try:
                job.begin()
                job.before_last_token(self.tokens[0])
                with job.recording():
                    return self._generation(tokens)
            except request_errors(job.model) as error:
                job.error = error
        return Failed(job.model, job, self.tokens)

    def _generation(self, tokens: list[list[int]]) -> Group:
        job = self.job
        kind: type[Group] = Single
        model, caches = job.loop_model, job.caches
        if job.joins:
            kind, model, caches = Group, job.model, list(map(batched, caches))
        generation = kind(
            model,
            self.uids,
            mx.array([sequence[-1] for sequence in tokens]),
            caches,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
        )
        generation.job = job
        return generation

    def extract_cache(self, idx: int) -> list[Any]:
        return self.job.extracted()
