"""Decide which caches to store in the prefix cache, and which cached prefix a request can continue from."""

from itertools import takewhile
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from ..caches.layers import is_compressed
from ..completions.body import Body, ChatBody
from ..completions.messages import Message
from ..completions.prompt import context_tokens
from ..engine.token_ids import common_prefix
from ..planning.config import CompressionConfig
from ..sparse.options import N_VOTERS
from .requests import EngineRequest, Loaded, StoredPrefix

MIN_CHECKPOINT = 128  # minimum number of tokens in a stored checkpoint or cancelled prompt
# Only this many tokens at a prompt's end are searched for the start of reasoning, as in mlx-lm's server.
MAX_THINK_START = 11


class Checkpoints:
    """Stores requests' caches in the prefix cache, and fetches them for later requests.

    When a request's caches are stored depends on how it is answered:

    - If entries are evicted during prefill, the compressed caches are stored after the answer.
    - If entries are evicted only after prefill, or with sparse attention, the full caches are stored after prefill.
    - Otherwise, the caches are stored after the answer.

    Some full caches can't be trimmed to the tokens that a later prompt shares. Copies of these caches are stored at
    checkpoints during prefill instead.

    Args:
        loaded: the served model and its prefix cache.
        options: keyword arguments for `CompressedBatchGenerator`.
    """

    def __init__(self, loaded: Loaded, options: dict[str, Any]):
        """Determine which caches can be stored, and whether they need checkpoints."""
        self._prefixes = loaded.prefixes
        self._tokenizer = loaded.tokenizer
        config, _ = CompressionConfig.from_keywords(options)
        self._setting = config.setting
        compress = config.compress
        sparse = config.sparse
        self._is_sparse = sparse is not None
        self._keeps_all_entries = not config.evicts_in_blocks
        # If every query votes for the entries to keep, caches can't be trimmed: trimming would remove tokens, but keep
        # their votes.
        accumulates_attention = (
            compress is not None and compress.decode_policy.accumulates_attention
        )
        model_can_trim = can_trim_prompt_cache(make_prompt_cache(loaded.model))
        can_trim = model_can_trim and not accumulates_attention
        # Caches that can't be trimmed can't provide a shorter prefix, so copy them during prefill.
        self._needs_checkpoints = self._keeps_all_entries and not can_trim
        # Number of tokens at the end of each prompt that never come from the prefix cache. The model has to read at
        # least one token. Unless entries are evicted during prefill, it also has to read all tokens whose queries vote,
        # because queries are recorded while tokens are read.
        self._n_unshared = 1
        if sparse is not None:
            self._n_unshared = N_VOTERS
        elif compress is not None and self._keeps_all_entries:
            self._n_unshared = max(1, compress.decode_policy.obs_window)

    def fetch(self, request: EngineRequest) -> tuple[list, int]:
        """Return caches for a prefix of a request's prompt, and the prefix's length.

        Returns: `([], 0)` if no prefix can be used.
        """
        if self._must_not_share_caches(request.body):
            return [], 0
        prompt = request.completion_request.prompt
        # A prompt that fits the budget is answered with full attention, so its prefix must not come from sparse
        # attention.
        is_answered_exactly = self._setting is not None and self._setting.fits(len(prompt))
        caches, n_cached = self._prefixes.fetch(prompt, self._n_unshared, exact=is_answered_exactly)
        if request.body.full_cache and is_compressed(caches):
            return [], 0
        return caches, n_cached

    def _must_not_share_caches(self, body: Body) -> bool:
        """Return whether a request needs its own caches: it wants the full cache, and others use sparse attention.

        Stored entries may have been quantised, or read sparsely.
        """
        return bool(body.full_cache) and self._is_sparse

    def checkpoint_lengths(self, body: Body, prompt: list[int]) -> list[int]:
        """Return the prompt lengths at which copies of the caches are stored, in ascending order.

        There are up to two checkpoints:

        - For prompts with the same system messages: `_n_unshared - 1` tokens before the end of these messages. A prompt
          has at least one more token after them, so at least `_n_unshared` of its tokens remain to be read.
        - For prompts that repeat or continue this one: before the last `_n_unshared` tokens. If the prompt ends with
          the start of reasoning, and that start is earlier, the checkpoint is before that start instead, because
          templates may leave the reasoning out of the next turn's prompt.
        """
        if not self._needs_checkpoints or not isinstance(body, ChatBody):
            return []
        if self._must_not_share_caches(body):
            return []
        after_system = self._n_system_tokens(body, prompt) - (self._n_unshared - 1)
        before_reasoning = min(self._reasoning_start(prompt), len(prompt) - self._n_unshared)
        lengths = sorted({after_system, before_reasoning})
        return [length for length in lengths if MIN_CHECKPOINT <= length < len(prompt)]

    def insert_checkpoint(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Store the caches of a request whose prefill has reached a checkpoint."""
        self._prefixes.insert(tokens, caches)
        *_, last_checkpoint = request.checkpoints
        if len(tokens) == last_checkpoint:
            # Keeps `insert_prompt` from storing the whole prompt as well.
            self._set_stored(request, tokens, caches)

    def stores_cancelled(self, request: EngineRequest) -> bool:
        """Return whether to store the caches of a request that is cancelled during prefill."""
        return self._keeps_all_entries and not self._must_not_share_caches(request.body)

    def insert_cancelled(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Store the caches of a cancelled request, so that a retry does not read the same tokens again.

        Do nothing if the caches have too few tokens, or include any of the prompt's last `_n_unshared` tokens.
        """
        prompt = request.completion_request.prompt
        max_length = len(prompt) - self._n_unshared
        if MIN_CHECKPOINT <= len(tokens) <= max_length:
            self._prefixes.insert(tokens, caches)

    def insert_prompt(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Store a request's caches, unless its prompt or the prompt's last checkpoint is already stored."""
        if request.stored_prefix is None:
            self._set_stored(request, tokens, caches)
            self._prefixes.insert(tokens, caches)

    def _set_stored(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Record what a request has stored.

        Keep a reference to the caches only if they will be written to a file. Any reference keeps the caches in memory,
        even after the prefix cache has evicted them.
        """
        caches_to_write = [] if self._prefixes.files is None else caches
        request.stored_prefix = StoredPrefix(tokens, caches_to_write)

    def insert_answer(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Store a finished request's caches, unless its prompt is already stored or other requests can't use them.

        Also write the stored caches to a file, if prefixes are kept on disk.
        """
        # Other requests can't continue from a full cache if they evict entries during prefill or use a store.
        others_need_different_caches = self._is_sparse or not self._keeps_all_entries
        if request.body.full_cache and others_need_different_caches:
            return
        self.insert_prompt(request, tokens, caches)
        files = self._prefixes.files
        if files is not None and request.stored_prefix is not None:
            files.write(*request.stored_prefix)

    def _n_system_tokens(self, body: ChatBody, prompt: list[int]) -> int:
        """Return the number of prompt tokens in the system messages.

        These are the tokens that the prompt shares with a chat that has the same system messages and an empty question.
        """
        system_messages = list(takewhile(lambda message: message.role == "system", body.messages))
        if not system_messages:
            return 0
        other_chat = [*system_messages, Message("user")]
        other_tokens = context_tokens(body, self._tokenizer, other_chat)
        return common_prefix([other_tokens, prompt])

    def _reasoning_start(self, prompt: list[int]) -> int:
        """Return the position at which the template starts reasoning, or the last token's position if it doesn't."""
        last_position = len(prompt) - 1
        if not self._tokenizer.has_thinking:
            return last_position
        first_position = len(prompt) - MAX_THINK_START
        position = self._tokenizer.rfind_think_start(prompt, start=first_position)
        starts_reasoning = position >= 0
        return position if starts_reasoning else last_position
