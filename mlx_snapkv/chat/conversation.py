"""Multi-turn chat with a prompt cache that stays small between turns."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache

from .. import saved
from ..caches.layers import is_compressed, n_tokens
from ..compress.policy import Policy
from ..engine.prefill import mlx_generate
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.restore import trim_to
from ..engine.serving import require_servable, serve
from ..engine.token_ids import common_prefix
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..planning.auto import CONVERSATION, resolve
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import MAX_TOKENS
from ..planning.settings import Setting, resolve_setting
from ..sparse.options import Sparse
from ..sparse.prompt_caches import caches_to_save, make_caches
from .prompts import Rendering, mlx_lm_suffix
from .states import STATE_FIELDS, StateBeforeTurn, load_saved


def _require_known_options(options: dict[str, Any]) -> None:
    """Check that mlx-lm's `generate_step` accepts every option. Raises: UnknownOptionError."""
    known_names = set(inspect.getfullargspec(mlx_generate.generate_step).kwonlyargs)
    known_names -= {"prompt_cache", "input_embeddings"}  # set by the conversation
    for name in options:
        if name not in known_names:
            advice = f"{suggestion(name, known_names)}; known: {', '.join(sorted(known_names))}"
            raise UnknownOptionError(f"unknown option {name!r} of a conversation{advice}")


class Conversation:
    """A chat whose prompt cache is compressed at every turn.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's mlx-lm tokenizer, which must have a chat template.
        policy: a policy object or string, or None for the full cache. "auto" picks a setting that suits the model and
            this machine; see docs/choose.md. In later turns, the policy chooses among the new entries and the entries
            kept by earlier turns.
        sparse: sparse attention instead of a policy; see `generate_step`.
        system: a system prompt.
        **options: mlx-lm options for `stream_generate`, used for every answer. With a policy, `kv_bits` and
            `kv_group_size` take effect only once a turn is compressed.

    Attributes:
        policy: the setting (a `Compress` or `Sparse` object), or None for the full cache.
        messages: the chat so far, in the form that chat templates expect.
        report: the last turn's compression report, or None before the first turn.
        prompt_cache: the caches that the next turn continues from.
        read: tokens of the chat that are in the cache.
        pending_tokens: tokens after `read` that are not in the cache yet. The next turn reads them.
        n_unknown: number of tokens at the start of `read` whose ids are unknown and are stored as 0. There are such
            tokens only if the chat started from an mlx-lm file, which contains no token ids.
        attached: documents to read with the next message.
        user_inputs: for each user message, its documents followed by the typed text.

    Raises: SnapKVError: an option is out of range, the model is not supported, or there is no chat template.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        policy: Policy | Setting | str | None = None,
        sparse: Sparse | dict[str, Any] | str | bool | None = None,
        system: str | None = None,
        **options: Any,
    ):
        """Check the options, the setting and the model. The system prompt is not read until the first message."""
        if not tokenizer.has_chat_template:
            raise SnapKVError("a conversation needs a chat template, and this model has none")
        config, generation, _ = resolve(
            model,
            None,
            CONVERSATION,
            options,
            policy=policy,
            sparse=sparse,
            max_tokens=options.get("max_tokens", MAX_TOKENS),
        )
        _require_known_options(generation)
        self.model = model
        self.tokenizer = tokenizer
        self.generation = generation
        self._render = Rendering(tokenizer)
        self.policy = config.setting
        if self.policy is not None:
            require_servable(model, self._config.with_mlx_options(generation))
        self.system = system
        self.reset()

    @property
    def _config(self) -> CompressionConfig:
        """Return the config that all turns share. `with_mlx_options` adds mlx-lm's options."""
        return CompressionConfig(self.policy, turns=True)

    def reset(self) -> None:
        """Start a new chat with the same options and system prompt."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.user_inputs: list[list[str]] = []
        self.attached: list[str] = []
        self.n_unknown = 0
        self._empty_cache()

    def _empty_cache(self) -> None:
        """Replace the prompt cache with an empty one, so that the next turn reads the whole chat."""
        if self.policy is None:
            self.prompt_cache = make_prompt_cache(self.model, self.generation.get("max_kv_size"))
        else:
            self.prompt_cache = make_caches(self.model, self._config.sparse)
        self.read: list[int] = []
        self.pending_tokens: list[int] = []
        self.report: CompressionReport | None = None
        self._state_before_turn: StateBeforeTurn | None = None

    def attach(self, text: str) -> int:
        """Attach a document to the next message, and return its length in tokens.

        With a policy, the question in the message decides which of the document's entries are kept.

        Raises: SnapKVError: the text is empty.
        """
        n_tokens = self.count(text)
        self.attached.append(text)
        return n_tokens

    def count(self, text: str) -> int:
        """Count the tokens in a document. Raises: SnapKVError: the text is empty."""
        if not text.strip():
            raise SnapKVError("the document is empty: give some text")
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def send(
        self, text: str, prompt_progress_callback: Callable[[int, int], None] | None = None
    ) -> Iterator[GenerationResponse]:
        """Send a message, and yield mlx-lm's responses as the answer is generated.

        If the caller stops early, the conversation keeps the answer so far. If reading the message fails or is
        interrupted, the conversation is unchanged.

        Raises: SnapKVError: the message is empty, or the chat template rejects it.
        """
        if not text.strip():
            raise SnapKVError("the message is empty: give some text")
        user_input = [*self.attached, text]
        messages = [*self.messages, {"role": "user", "content": "\n\n".join(user_input)}]
        options = {"prompt_progress_callback": prompt_progress_callback, **self.generation}
        return self._stream_turn(messages, user_input, self._unread_tokens(messages), options)

    def undo(self) -> str:
        """Undo the last turn, attach its documents again, and return the typed text.

        If there is a copy of the state before the turn, the turn is undone exactly. A copy is kept only for the turn
        sent last, and only if it takes no more memory than the conversation.

        If there is no copy, the cache is trimmed to the remaining messages. A cache that can't be trimmed, such as a
        compressed one, is emptied, and the next turn reads the chat again.

        Raises: SnapKVError: there is no turn to undo, or there is no copy and the chat started from an mlx-lm file,
            which contains no text to read again.
        """
        if not self.user_inputs:
            raise SnapKVError("the conversation is empty, so there is nothing to undo")
        *documents, typed_text = self.user_inputs[-1]
        if self._state_before_turn is None:
            self._drop_last_turn()
        else:
            self._state_before_turn.restore()
            self._state_before_turn = None
        self.attached = [*documents, *self.attached]
        return typed_text

    def _drop_last_turn(self) -> None:
        """Drop the last turn's messages, and trim or empty the cache.

        Raises: SnapKVError: the chat started from an mlx-lm file, which contains no text.
        """
        if self.n_unknown:
            raise SnapKVError(
                "this turn can't be undone: the file that the conversation began with does not hold its text"
            )
        self.messages = self.messages[:-2]  # the user's message and the answer
        self.user_inputs = self.user_inputs[:-1]
        remaining_tokens: list[int] = []
        if self.user_inputs:
            remaining_tokens = self._render(self.messages, add_generation_prompt=False)
        n_shared = common_prefix([remaining_tokens, self.read])
        shared_tokens = self.read[:n_shared]
        earlier_cache = self.prompt_cache
        self._empty_cache()  # the earlier cache is put back below if it can be trimmed
        counts_tokens = n_tokens(earlier_cache) > 0  # a model with only linear states does not
        may_trim = n_shared > 0 and counts_tokens and not is_compressed(earlier_cache)
        if may_trim and trim_to(n_shared, earlier_cache):
            self.read = shared_tokens
            self.prompt_cache = earlier_cache

    @property
    def undo_nbytes(self) -> int:
        """Return how many KV bytes are kept only for `undo`."""
        return 0 if self._state_before_turn is None else self._state_before_turn.caches.kv_nbytes

    def save(self, path: str | Path) -> None:
        """Save the conversation to a `.safetensors` file atomically.

        Raises: SnapKVError: the conversation is empty, or the file can't be written.
        """
        if not self.read:
            raise SnapKVError("the conversation is empty, so there is nothing to save")
        notes = {name: getattr(self, name) for name in STATE_FIELDS}
        caches = caches_to_save(self.prompt_cache)
        saved.save(path, self.model, caches, self.read, self.policy or NO_POLICY, notes)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model,
        tokenizer,
        *,
        policy: Policy | Setting | str | None = None,
        sparse: Sparse | dict[str, Any] | str | bool | None = None,
        **options: Any,
    ) -> "Conversation":
        """Load a saved conversation, or start a conversation about saved text.

        The system prompt is loaded from the file. An mlx-lm file contains it only as part of the cache, so it is lost
        on `reset`.

        Args:
            path: a file written by `save`, `mlx-snapkv cache-prompt` or mlx-lm.
            model: the model that filled the cache.
            tokenizer: the model's tokenizer.
            policy: a policy, used if the file was saved without a setting. Otherwise, the file's setting is used.
            sparse: sparse attention, used if the file was saved without a setting. If the file was saved with sparse
                attention, only `store` and `store_dir` are used. Entries are moved to `store` unless it is "memory".
            **options: see `Conversation`. They are not saved in files.

        Raises: SnapKVError: the file is damaged, belongs to a different model, or can't be used with this setting.
        """
        setting = policy if sparse is None else resolve_setting(policy=policy, sparse=sparse)
        resumed_setting, attributes = load_saved(path, model, setting)
        conversation = cls(
            model, tokenizer, policy=resumed_setting, system=attributes["system"], **options
        )
        vars(conversation).update(attributes)
        return conversation

    def _stream_turn(
        self, messages: list, user_input: list[str], tokens: list[int], options: dict[str, Any]
    ) -> Iterator[GenerationResponse]:
        """Yield the responses to `tokens`, then add the turn to the conversation.

        If there is no answer, the conversation is restored to its state before the turn. Until the first token of the
        answer arrives, the copy of the state before the previous turn is kept, so that `undo` can still undo the
        previous turn exactly.

        Args:
            messages: the chat, including the new user message.
            user_input: the documents and the text of this message.
            tokens: tokens of the chat that are not in the cache yet.
            options: keyword arguments for mlx-lm's `stream_generate`.
        """
        state_before = StateBeforeTurn(self)
        text = ""
        answer_tokens: list[int] = []
        stream_answer = partial(
            mlx_generate.stream_generate, tokenizer=self.tokenizer, prompt=mx.array(tokens)
        )
        set_report = partial(setattr, self, "report")
        responses = serve(
            stream_answer,
            self.model,
            len(tokens),
            options.get("max_tokens", MAX_TOKENS),
            self._config,
            set_report,
            options | {"prompt_cache": self.prompt_cache},
        )
        try:
            for response in responses:
                if not answer_tokens:
                    self._state_before_turn = None  # frees the previous turn's copy of the caches
                answer_tokens.append(response.token)
                text += response.text
                yield response
        finally:
            responses.close()  # type: ignore[attr-defined]  # always a generator
            mx.clear_cache()  # the next turn needs buffers of different sizes
            if answer_tokens:
                self.messages = [*messages, {"role": "assistant", "content": text}]
                self.user_inputs = [*self.user_inputs, user_input]
                self.attached = []
                self._add_tokens(tokens + answer_tokens, state_before)
                self._state_before_turn = state_before if state_before.is_worth_keeping else None
            else:
                state_before.restore()

    def _unread_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of the chat that are not in the cache yet."""
        is_first_after_mlx_lm_file = self.n_unknown > 0 and not self.messages
        if is_first_after_mlx_lm_file:
            return mlx_lm_suffix(self.tokenizer, messages[-1]["content"])
        chat_tokens = self._render(messages, add_generation_prompt=True)
        known_tokens = self.read + self.pending_tokens
        if chat_tokens[: len(known_tokens)] == known_tokens:
            return chat_tokens[len(self.read) :]
        # The rendered chat does not start with the known tokens. Either the template changes earlier answers, or
        # tokenizing an answer's text does not give the tokens that were generated. Keep the known tokens, and add only
        # what follows the earlier messages.
        earlier_tokens = self._render(self.messages, add_generation_prompt=False)
        n_shared = common_prefix([earlier_tokens, chat_tokens])
        return self.pending_tokens + chat_tokens[n_shared:]

    def _add_tokens(self, tokens: list[int], state_before: StateBeforeTurn) -> None:
        """Add new tokens to `read` if they are in the cache, or else to `pending_tokens`.

        If decoding was interrupted in the middle of a token, some layers may have read one token more than others. That
        token is trimmed. If the caches can't be trimmed, they are restored to the state before this turn, and the next
        turn reads this turn again.
        """
        all_tokens = self.read + tokens
        if not trim_to(len(all_tokens), self.prompt_cache):
            state_before.caches.restore()
            n_read = len(self.read)
        elif self.policy is None:
            n_read = len(all_tokens)
        else:
            n_read = n_tokens(self.prompt_cache)
        self.read = all_tokens[:n_read]
        self.pending_tokens = all_tokens[n_read:]
