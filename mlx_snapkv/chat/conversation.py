"""Chat in several turns, and keep the prompt cache small between turns."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache

from .. import saved
from ..caches.layers import is_compressed, n_tokens_read
from ..compress.policy import Policy
from ..engine.prefill import mlx_generate
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.restore import trim_to
from ..engine.serving import require_servable, serve
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..planning.auto import CONVERSATION, resolve
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import MAX_TOKENS
from ..planning.settings import Setting, resolve_setting
from ..sparse.options import Sparse
from ..sparse.prompt_caches import caches_to_save, make_caches
from .prompts import Rendering, common_prefix, mlx_lm_suffix
from .states import STATE_FIELDS, StateBefore, load


def _require_options(options: dict[str, Any]) -> None:
    """Check the names of a conversation's options.

    Raises: UnknownOptionError: mlx-lm's `generate_step` has no such option.
    """
    known = set(inspect.getfullargspec(mlx_generate.generate_step).kwonlyargs)
    known -= {"prompt_cache", "input_embeddings"}  # set by the conversation
    for name in options:
        if name not in known:
            advice = f"{suggestion(name, known)}; known: {', '.join(sorted(known))}"
            raise UnknownOptionError(f"unknown option {name!r} of a conversation{advice}")


class Conversation:
    """A chat whose prompt cache is compressed at every turn.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer from mlx-lm, with a chat template.
        policy: a policy object or string; None keeps the full cache. "auto" selects what suits the model and this
            machine; see docs/choose.md. At later turns, the policy chooses among the entries that earlier turns kept
            and the new entries.
        sparse: sparse attention instead of a policy; see `generate_step`.
        system: a system prompt.
        **options: mlx-lm's options of `stream_generate`, for every answer. With a policy, `kv_bits` and `kv_group_size`
            apply to compressed entries; entries stay plain until a turn is compressed.

    Attributes:
        policy: the setting; None for the full cache.
        messages: the chat so far, as chat templates take it.
        report: report of the last turn's compression; None before the first turn.
        prompt_cache: caches from which the next turn continues.
        read: tokens of the chat that the cache has read.
        pending_tokens: tokens after `read`, which the next turn reads.
        n_unknown: number of first tokens in `read` that are unknown, because files of mlx-lm do not contain them; they
            are 0 in `read`.
        attached: documents that will be read with the next message.
        user_inputs: for each user message, its documents followed by the text that was typed.

    Raises: SnapKVError: an option is out of range, the model is not supported, or it has no chat template.
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
        """Check options, setting and model. Nothing is read before the first message."""
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
        _require_options(generation)
        self.model = model
        self.tokenizer = tokenizer
        self.generation = generation
        self._render = Rendering(tokenizer)
        self.policy = config.setting
        if self.policy is None:
            self._config.require(model)
        else:
            require_servable(model, self._config.with_mlx_options(generation))
        self.system = system
        self.reset()

    @property
    def _config(self) -> CompressionConfig:
        """Return the config that all turns share, without mlx-lm's options."""
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
        """Start with an empty prompt cache, so that the next turn reads the whole chat."""
        if self.policy is None:
            self.prompt_cache = make_prompt_cache(self.model, self.generation.get("max_kv_size"))
        else:
            self.prompt_cache = make_caches(self.model, self._config.sparse)
        self.read: list[int] = []
        self.pending_tokens: list[int] = []
        self.report: CompressionReport | None = None
        self._before_last: StateBefore | None = None

    def attach(self, text: str) -> int:
        """Add a document before the next message, and return its number of tokens.

        The question in the message will choose among the document's entries.

        Raises: SnapKVError: the text is empty.
        """
        n_tokens = self.count(text)
        self.attached.append(text)
        return n_tokens

    def count(self, text: str) -> int:
        """Return the number of tokens in a document. Raises: SnapKVError: the text is empty."""
        if not text.strip():
            raise SnapKVError("the document is empty: give some text")
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def send(
        self, text: str, prompt_progress_callback: Callable[[int, int], None] | None = None
    ) -> Iterator[GenerationResponse]:
        """Send a message, and yield mlx-lm's responses while the answer is generated.

        If the caller stops early, the conversation keeps the part of the answer that was generated. If reading the
        message fails or is interrupted, the conversation does not change.

        Raises: SnapKVError: the message is empty, or the chat template rejects it.
        """
        if not text.strip():
            raise SnapKVError("the message is empty: give some text")
        parts = [*self.attached, text]
        messages = [*self.messages, {"role": "user", "content": "\n\n".join(parts)}]
        options = {"prompt_progress_callback": prompt_progress_callback, **self.generation}
        return self._answers(messages, parts, self._unread(messages), options)

    def undo(self) -> str:
        """Undo the last turn, attach its documents again, and return the text that was typed.

        The last turn is undone exactly, unless the copy of the earlier state would take more memory than the
        conversation itself. For earlier turns, and turns from a file, a cache with all entries is trimmed to the
        remaining messages. Any other cache is emptied, and the next message reads the conversation again.

        Raises: SnapKVError: there is no turn to undo, or the chat started from a file of mlx-lm, which has no text.
        """
        if not self.user_inputs:
            raise SnapKVError("the conversation is empty, so there is nothing to undo")
        *documents, typed = self.user_inputs[-1]
        if self._before_last is None:
            self._go_back_to_messages()
        else:
            self._before_last.restore()
            self._before_last = None
        self.attached = [*documents, *self.attached]
        return typed

    def _go_back_to_messages(self) -> None:
        """Drop the messages of the last turn, and trim or empty the cache."""
        if self.n_unknown:
            raise SnapKVError(
                "this turn can't be undone: the file that the conversation began with does not hold its text"
            )
        self.messages = self.messages[:-2]  # one message of the user, and its answer
        self.user_inputs = self.user_inputs[:-1]
        remaining: list[int] = []
        if self.user_inputs:
            remaining = self._render(self.messages, add_generation_prompt=False)
        n_shared = common_prefix([remaining, self.read])
        read = self.read[:n_shared]
        caches = self.prompt_cache
        self._empty_cache()
        can_trim = n_shared > 0 and not is_compressed(caches)
        if can_trim and trim_to(n_shared, caches):
            self.read = read
            self.prompt_cache = caches

    @property
    def undo_nbytes(self) -> int:
        """Return the bytes of keys and values that only `undo` needs."""
        return 0 if self._before_last is None else self._before_last.caches.kv_nbytes

    def save(self, path: str | Path) -> None:
        """Write the conversation to a `.safetensors` file, completely or not at all.

        Raises: SnapKVError: the conversation is empty, or the file can't be written.
        """
        if not self.read:
            raise SnapKVError("the conversation is empty, so there is nothing to save")
        notes = {name: getattr(self, name) for name in STATE_FIELDS}
        caches = caches_to_save(self.model, self.prompt_cache)
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
        """Load a saved conversation, or a text saved by `mlx-snapkv cache-prompt` or mlx-lm to ask questions about.

        The system prompt comes from the file. In a file of mlx-lm it is only in the cache, so `reset` drops it.

        Args:
            path: a file written by `save`, `mlx-snapkv cache-prompt` or mlx-lm.
            model: the model that filled the cache.
            tokenizer: its tokenizer.
            policy: a policy for a file that was saved without a setting. A conversation that was saved with a setting
                keeps it.
            sparse: sparse attention for a file that was saved without a setting. If the file has its own, its entries
                move to the `store` of this one, unless that is "memory".
            **options: see `Conversation`; files do not contain mlx-lm's options.

        Raises: SnapKVError: the file is damaged, belongs to another model, or can't be used with this setting.
        """
        setting = policy if sparse is None else resolve_setting(policy=policy, sparse=sparse)
        keywords, state = load(path, model, setting)
        conversation = cls(model, tokenizer, **options, **keywords)
        vars(conversation).update(state)
        return conversation

    def _answers(
        self, messages: list, parts: list[str], tokens: list[int], options: dict[str, Any]
    ) -> Iterator[GenerationResponse]:
        """Yield the responses to `tokens`. Then add the turn, or restore the conversation if there is no answer.

        Until the first token of this answer, the previous turn can be undone exactly.

        Args:
            messages: the chat with the new user message.
            parts: documents and text of this message.
            tokens: tokens of the chat that the cache has not read.
            options: keywords of mlx-lm's `stream_generate`.
        """
        before = StateBefore(self)
        text = ""
        answer_tokens: list[int] = []
        responses = serve(
            partial(
                mlx_generate.stream_generate, tokenizer=self.tokenizer, prompt=mx.array(tokens)
            ),
            self.model,
            len(tokens),
            options.get("max_tokens", MAX_TOKENS),
            self._config,
            partial(setattr, self, "report"),
            options | {"prompt_cache": self.prompt_cache},
        )
        try:
            for response in responses:
                if not answer_tokens:
                    self._before_last = None  # frees its copy of the caches
                answer_tokens.append(response.token)
                text += response.text
                yield response
        finally:
            responses.close()  # type: ignore[attr-defined]  # all of these are generators
            mx.clear_cache()  # buffers of the next turn have other sizes
            if answer_tokens:
                self.messages = [*messages, {"role": "assistant", "content": text}]
                self.user_inputs = [*self.user_inputs, parts]
                self.attached = []
                self._remember(tokens + answer_tokens, before)
                self._before_last = before if before.is_cheap else None
            else:
                before.restore()

    def _unread(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of the chat that the cache has not read yet."""
        if self.n_unknown and not self.messages:
            return mlx_lm_suffix(self.tokenizer, messages[-1]["content"])
        whole = self._render(messages, add_generation_prompt=True)
        known = self.read + self.pending_tokens
        if whole[: len(known)] == known:
            return whole[len(self.read) :]
        # The template renders earlier answers differently, or tokenizes them differently than the model generated them.
        earlier = self._render(self.messages, add_generation_prompt=False)
        return self.pending_tokens + whole[common_prefix([earlier, whole]) :]

    def _remember(self, tokens: list[int], before: StateBefore) -> None:
        """Update `read` and `pending_tokens` by new tokens. With sparse attention, the cache has not read the answer.

        If a step was interrupted after some layers had read its token, this token is trimmed. If the caches can't be
        trimmed, they are restored, and the next turn reads this turn again.
        """
        sequence = self.read + tokens
        n_read = len(sequence)
        if not trim_to(len(sequence), self.prompt_cache):
            before.caches.restore()
            n_read = len(self.read)
        elif self.policy is not None:
            n_read = n_tokens_read(self.model, self.prompt_cache)
        self.read = sequence[:n_read]
        self.pending_tokens = sequence[n_read:]
