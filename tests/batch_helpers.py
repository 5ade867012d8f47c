"""Helpers that run requests in a batch and compare them with the same requests run alone."""

import functools
import random

import mlx.core as mx
from request_helpers import steps

from mlx_snapkv.batch.generator import CompressedBatchGenerator


def prompts_of(*lengths, vocab_size=64, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(n)] for n in lengths]


def alone(model, prompt, n, **keywords):
    """Run a request alone, and return its tokens."""
    return [int(token) for token, _ in steps(model, mx.array(prompt), n, **keywords)]


class Run:
    """A batch generator with its answers, reports, read caches and last responses, each keyed by request id."""

    def __init__(self, model, policy, **options):
        self.reports, self.read, self.answers, self.last = {}, {}, {}, {}
        self.generator = CompressedBatchGenerator(
            model,
            policy=policy,
            on_report=self.reports.setdefault,
            on_read=lambda uid, *told: self.read.update({uid: told}),
            **options,
        )
        self.alone = functools.partial(alone, model, policy=policy)

    def insert(self, prompts, max_tokens, **options):
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        return self.generator.insert([list(p) for p in prompts], limits, **options)

    def staggered(self, prompts, limits):
        """Start with two prompts, and add one more every four steps. Return all request ids."""
        uids = self.insert(prompts[:2], limits[:2])
        for prompt, limit in zip(prompts[2:], limits[2:]):
            for _ in range(4):
                self.step()
            uids += self.insert([prompt], [limit])
        self.finish()
        return uids

    def assert_alone(self, uids, prompts, limits):
        """Assert that all requests have ended with the same answers and reports as if run alone."""
        for uid, prompt, limit in zip(uids, prompts, limits):
            reports = []
            assert self.answers[uid] == self.alone(prompt, limit, on_report=reports.append)
            assert self.reports[uid].entries_kept == reports[0].entries_kept
            assert self.reports[uid].reason == reports[0].reason
            assert self.last[uid].finish_reason == "length", self.last[uid].error

    def step(self):
        """Take one step. Return the prompt and answer responses, or None if nothing was left to do."""
        prompts, responses = self.generator.next()
        for response in responses:
            if response.finish_reason != "error":
                self.answers.setdefault(response.uid, []).append(response.token)
            self.last[response.uid] = response
        return (prompts, responses) if prompts or responses else None

    def finish(self):
        while self.step():
            pass
        return self.answers
