"""Where a prompt's caches are kept for later prompts, and what a prompt takes from earlier ones."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from ..chat.common_prefix import common_prefix
from ..completions.body import Body, ChatBody
from ..completions.request import chat_tokens
from .prefix_cache import PrefixCache
from .requests import EngineRequest

SHORTEST = 128  # tokens that are worth a checkpoint
THOUGHTS = (
    11  # last tokens in which a template may begin the model's thoughts, as in mlx-lm's server
)


class Checkpoints:
    """Fills and asks the prefix cache, as far as the policy and the model's caches allow.

    Args:
        generation: keywords of `CompressedBatchGenerator`: policy, memory and so on.
    """

    def __init__(
        self, prefixes: PrefixCache, model: Any, tokenizer: Any, generation: dict[str, Any]
    ):
        self._prefixes, self._tokenizer = prefixes, tokenizer
        policy = generation.get("policy")
        in_blocks = policy is not None and policy.reads_in_blocks
        recalls = generation.get("memory", "drop") != "drop"
        # A policy that reads a prompt twice has to read all of it.
        self._keeps_nothing = policy is not None and policy.stages[1].repeats is not None
        self._keeps_all = policy is None or (recalls and not in_blocks)
        # Where a kept cache can't be cut to a shorter prefix, several prefixes are kept.
        trims = can_trim_prompt_cache(make_prompt_cache(model))
        self._keeps_prefixes = not (self._keeps_nothing or in_blocks or (self._keeps_all and trims))
        # Tokens that are read whatever is known of a prompt, so that the observation window is whole.
        self._n_last = 1
        if policy is not None and self._keeps_all:
            self._n_last = max(1, policy.stages[1].obs_window)

    def fetch(self, prompt: list[int]) -> tuple[list | None, int]:
        """Caches that have read the beginning of a prompt, if there are such, and how many tokens that is."""
        if self._keeps_nothing:
            return None, 0
        return self._prefixes.fetch(prompt, self._n_last)

    def places(self, body: Body, prompt: list[int]) -> list[int]:
        """After how many of a prompt's tokens its caches are kept, in order.

        That is after the system messages, less what every prompt reads anew; where all entries are kept, also at the
        prompt's end, before the thoughts that a template begins and leaves out of the next turn's prompt.
        """
        if not self._keeps_prefixes or not isinstance(body, ChatBody):
            return []
        found = {self._system_end(body, prompt) - (self._n_last - 1)}
        if self._keeps_all:
            found.add(min(self._thoughts_start(prompt), len(prompt) - self._n_last))
        return sorted(n for n in found if SHORTEST <= n < len(prompt))

    def reached(self, request: EngineRequest, n: int, tokens: list[int], caches: list) -> None:
        """Keep the caches of a request that has read `n` tokens of its prompt, one of its checkpoints."""
        self._prefixes.insert(tokens, caches)
        if self._keeps_all and n == request.checkpoints[-1]:  # it stands for the whole prompt
            request.full = list(tokens), caches

    def read(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Keep the caches of a request that has read its prompt, unless a checkpoint stands for it."""
        if request.full is None:
            request.full = tokens, caches
            self._prefixes.insert(tokens, caches)

    def answered(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Keep the caches of an answered request, also for when the server has ended."""
        if self._keeps_nothing:
            return
        self.read(request, tokens, caches)
        assert request.full is not None
        self._prefixes.write(*request.full)

    def _system_end(self, body: ChatBody, prompt: list[int]) -> int:
        messages = body.template_messages()
        n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        if n == 0:
            return 0
        other = [*messages[:n], {"role": "user", "content": ""}]
        alone = chat_tokens(body, self._tokenizer, other, add_generation_prompt=False)
        return common_prefix([alone, prompt])

    def _thoughts_start(self, prompt: list[int]) -> int:
        last = len(prompt) - 1
        if not self._tokenizer.has_thinking:
            return last
        start = self._tokenizer.rfind_think_start(prompt, start=len(prompt) - THOUGHTS)
        return last if start < 0 else start
