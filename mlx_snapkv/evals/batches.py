"""Many prompts at once, by the batch generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ..batch.generator import CompressedBatchGenerator
from ..caches.layers import attention_layers
from ..engine.decision import gate
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.serving import NO_POLICY_REASON
from ..policies import Policy, Stages
from ..several.part import part_of
from .prompt import Answer, Prompt

# Entries per KV head that the prompts of a batch hold together, so that full caches don't fill the memory.
ROOM = 16_384

Key = TypeVar("Key")


def in_batches(
    model,
    tokenizer,
    prompts: Iterable[tuple[Key, Prompt]],
    policy: Policy | Stages | None,
    batch_size: int,
) -> Iterator[tuple[Key, Answer]]:
    """Each prompt's answer, as it ends, with its key; at most `batch_size` at once, and fewer of large caches.

    The next prompt is asked for when there is room for it. Given caches are left as they are.
    """
    batch = _Batch(model, tokenizer, policy, batch_size)
    with contextlib.closing(batch.generator):
        for key, prompt in prompts:
            n_entries = _entries(model, policy, prompt)
            while not batch.has_room(n_entries):
                yield from batch.step()
            batch.insert(key, prompt, n_entries)
        while batch.running:
            yield from batch.step()


def _entries(model, policy: Policy | Stages | None, prompt: Prompt) -> int:
    """Entries per KV head that a prompt is going to hold."""
    n = len(prompt.tokens)
    if prompt.cache is not None:
        layers = attention_layers(model, prompt.cache)
        return n + max(layer.entries_in(prompt.cache).n_entries for layer in layers)
    if policy is None or gate(policy, n, None, prompt.max_tokens) is not None:
        return n
    return policy.stages[1].quotas(n, 1)[0].entries


class _Batch:
    """The prompts that are being answered."""

    def __init__(self, model, tokenizer, policy: Policy | Stages | None, batch_size: int):
        self.running: dict[int, _Running] = {}
        self.generator = CompressedBatchGenerator(
            model,
            policy=policy,
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
            on_report=self._report,
            completion_batch_size=batch_size,
            prefill_batch_size=1,  # also without a policy: together they need more time, and memory
        )
        self._ranks = part_of(model).ranks
        self._tokenizer, self._policy, self._batch_size = tokenizer, policy, batch_size

    def has_room(self, n_entries: int) -> bool:
        held = sum(one.n_entries for one in self.running.values())
        few = len(self.running) < self._batch_size and held + n_entries <= ROOM
        return few or not self.running

    def insert(self, key: Any, prompt: Prompt, n_entries: int) -> None:
        given = None if prompt.cache is None else [prompt.cache]
        (uid,) = self.generator.insert([prompt.tokens], [prompt.max_tokens], caches=given)
        self.running[uid] = _Running(key, prompt, n_entries, self._tokenizer.detokenizer)
        if self._policy is None:
            self._report(uid, CompressionReport(NO_POLICY, len(prompt.tokens), NO_POLICY_REASON))

    def step(self) -> Iterator[tuple[Any, Answer]]:
        """A token of every prompt that is read; the answers that end with it."""
        for response in self.generator.next_generated():
            one = self.running[response.uid]
            if response.finish_reason == "error":
                raise response.error
            one.add(response)
            # An answer that has been told goes on until its prompt is compressed, which it may vote on.
            if response.finish_reason is not None or (one.answered and one.report is not None):
                yield one.key, self._ended(response)

    def _ended(self, response: Any) -> Answer:
        uid, cache = response.uid, response.prompt_cache
        if response.finish_reason is None:
            cache, _ = self.generator.remove([uid], return_prompt_caches=True)[uid]
        one = self.running.pop(uid)
        assert one.report is not None
        return Answer(one.text, list(cache), one.report, ranks=self._ranks)

    def _report(self, uid: int, report: CompressionReport) -> None:
        self.running[uid].report = report


class _Running:
    """A prompt's answer so far, put together as mlx-lm's `stream_generate` does."""

    def __init__(self, key: Any, prompt: Prompt, n_entries: int, detokenizer: Any):
        self.key, self.n_entries = key, n_entries
        self.text, self.answered = "", False
        self.report: CompressionReport | None = None
        self._is_answered, self._detokenizer = prompt.is_answered, detokenizer

    def add(self, response: Any) -> None:
        if self.answered:
            return
        if response.finish_reason != "stop":
            self._detokenizer.add_token(response.token)
        if response.finish_reason is not None:
            self._detokenizer.finalize()
        self.text += self._detokenizer.last_segment
        self.answered = self._is_answered(self.text)
