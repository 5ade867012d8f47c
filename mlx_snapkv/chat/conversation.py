"""Several turns over one document, each answered from a small cache."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache

from .. import saved
from ..caches.layers import held_tokens, is_compressed
from ..compress.policy import Policy
from ..engine.prefill import mlx_generate
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.restore import trimmed_to
from ..engine.serving import require_servable, served
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..planning.auto import CONVERSATION, resolve
from ..planning.config import CompressionConfig
from ..planning.options import OPTIONS, noted
from ..planning.prompt_plan import MAX_TOKENS
from ..planning.settings import Setting, resolve_setting
from ..sparse.options import Sparse
from ..sparse.prompt_caches import make_caches, saved_forms
from .prompts import Rendering, common_prefix, mlx_lm_suffix
from .states import STATE_FIELDS, Before, load


def _require_options(options: dict[str, Any]) -> None:
    """Raises: UnknownOptionError: one is neither of `RequestOptions` nor of mlx-lm's for an answer."""
    reserved = {"prompt_cache", "input_embeddings"}  # which the conversation gives
    known = {*inspect.getfullargspec(mlx_generate.generate_step).kwonlyargs, *OPTIONS} - reserved
    for name in options.keys() - known:
        why = f"{suggestion(name, known)}; known: {', '.join(sorted(known))}"
        raise UnknownOptionError(f"unknown option {name!r} of a conversation{why}")


class Conversation:
    """A chat whose cache is kept small by a policy, turn after turn.

    Args:
        model, tokenizer: as mlx-lm loads them; the tokenizer has a chat template.
        policy: a policy object or string; without one the full cache is kept. "auto" takes what suits the model and
            this machine, as docs/choose.md has it. Later turns vote over the entries that are left and their own.
        sparse: as of `generate_step`.
        system: a system prompt.
        **options: those of `RequestOptions`, and of mlx-lm's `stream_generate`, for every answer. With a policy,
            `kv_bits` and `kv_group_size` apply to compressed entries; a turn that is not compressed stays plain until
            one is.

    Attributes:
        options: how the conversation is served beside its policy: `RequestOptions` as keywords.
        messages: the chat so far, as the chat template takes it.
        report: what the last turn's compression did; None before the first turn.
        prompt_cache: what the next turn continues.
        read, pending_tokens: the chat's tokens that the cache has read, and those after them.
        n_unknown: how many of the first tokens a file of mlx-lm's left out; they are listed as 0.
        attached: documents that will be read with the next message.
        said: the parts of every message of the user's: its documents, then what was typed.

    Raises: SnapKVError: an option is out of range, the model can't be compressed, or has no chat template.
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
        _require_options(options)
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
        self.model, self.tokenizer, self.generation = model, tokenizer, generation
        self._rendered = Rendering(tokenizer)
        self.policy, self.options = config.setting, config.keywords
        if self.policy is None:
            self._config.require(model)
        else:
            require_servable(model, self._config.beside(generation))
        self.system = system
        self.reset()

    @property
    def _config(self) -> CompressionConfig:
        return CompressionConfig(self.policy, **self.options, turns=True)

    @property
    def store(self) -> str | None:
        """Where sparse attention keeps all entries."""
        return self.options["store"]

    def reset(self) -> None:
        """Forget everything but the options and the system prompt."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.said: list[list[str]] = []
        self.attached: list[str] = []
        self.n_unknown = 0
        self._read_nothing()

    def _read_nothing(self) -> None:
        if self.policy is None:
            self.prompt_cache = make_prompt_cache(self.model, self.generation.get("max_kv_size"))
        else:
            self.prompt_cache = make_caches(self.model, self.store, self.options["store_dir"])
        self.read: list[int] = []
        self.pending_tokens: list[int] = []
        self.report: CompressionReport | None = None
        self._before_last: Before | None = None

    def attach(self, text: str) -> int:
        """Put a document in front of the next message, whose question then chooses among its entries; its tokens.

        Raises: SnapKVError: the text is empty.
        """
        n_tokens = self.count(text)
        self.attached.append(text)
        return n_tokens

    def count(self, text: str) -> int:
        """The tokens of a document. Raises: SnapKVError: it is empty."""
        if not text.strip():
            raise SnapKVError("the document is empty: give some text")
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def send(
        self, text: str, prompt_progress_callback: Callable[[int, int], None] | None = None
    ) -> Iterator[GenerationResponse]:
        """One turn: mlx-lm's responses, as the answer comes.

        If the caller stops early, the conversation keeps the part of the answer that was generated. If reading the
        message fails or is interrupted, the conversation is as it was before.

        Raises: SnapKVError: the message is empty, or the chat template refuses it.
        """
        if not text.strip():
            raise SnapKVError("the message is empty: give some text")
        parts = [*self.attached, text]
        messages = [*self.messages, {"role": "user", "content": "\n\n".join(parts)}]
        options = {"prompt_progress_callback": prompt_progress_callback, **self.generation}
        return self._answers(messages, parts, self._unread(messages), options)

    def undo(self) -> str:
        """Undo the last turn and attach its documents again; what was typed in it.

        The last turn is undone exactly, unless that would take more memory than the conversation itself. For earlier
        turns and those of a file, a cache with all entries keeps those of the remaining messages. Any other cache is
        emptied, and the next message reads the conversation again.

        Raises: SnapKVError: nothing has been said yet, or a file of mlx-lm's does not have its text.
        """
        if not self.said:
            raise SnapKVError("the conversation is empty, so there is nothing to undo")
        *documents, typed = self.said[-1]
        if self._before_last is None:
            self._go_back_to_messages()
        else:
            self._before_last.restore()
            self._before_last = None
        self.attached = [*documents, *self.attached]
        return typed

    def _go_back_to_messages(self) -> None:
        if self.n_unknown:
            raise SnapKVError(
                "this turn can't be undone: the file that the conversation began with does not hold its text"
            )
        messages, said = self.messages[:-2], self.said[:-1]
        left = self._rendered(messages, add_generation_prompt=False) if said else []
        read, caches = self.read[: common_prefix([left, self.read])], self.prompt_cache
        self._read_nothing()
        self.messages, self.said = messages, said
        if read and not is_compressed(caches) and trimmed_to(len(read), caches):
            self.read, self.prompt_cache = read, caches

    @property
    def undo_nbytes(self) -> int:
        """Bytes of keys and values that are kept for `undo` alone."""
        return 0 if self._before_last is None else self._before_last.caches.kv_nbytes

    def save(self, path: str | Path) -> None:
        """Write the conversation to a `.safetensors` file, as a whole or not at all. Raises: SnapKVError."""
        if not self.read:
            raise SnapKVError("the conversation is empty, so there is nothing to save")
        notes = {name: getattr(self, name) for name in STATE_FIELDS} | {
            "options": noted(self.options)
        }
        caches = saved_forms(self.model, self.prompt_cache)
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
        """Continue a saved conversation, or ask about a text that `mlx-snapkv cache-prompt` or mlx-lm saved.

        The system prompt is the file's. mlx-lm's files have it in the cache only, so that a `reset` loses it.

        Args:
            policy, sparse: for a file without either, whose entries the next message, or every token of an answer,
                then chooses among; a conversation that was saved with one keeps its own, and its `RequestOptions`.
            **options: as of a new conversation; mlx-lm's are not saved.

        Raises: SnapKVError: the file is damaged, another model's, or can't be used with that policy.
        """
        method = policy if sparse is None else resolve_setting(policy=policy, sparse=sparse)
        own, state = load(path, model, method, options)
        conversation = cls(model, tokenizer, **options | own)
        vars(conversation).update(state)
        return conversation

    def _answers(
        self, messages: list, parts: list[str], tokens: list[int], options: dict[str, Any]
    ) -> Iterator[GenerationResponse]:
        before, text = Before(self), ""
        answered: list[int] = []
        responses = served(
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
                if not answered:
                    self._before_last = None
                answered.append(response.token)
                text += response.text
                yield response
        finally:
            responses.close()  # type: ignore[attr-defined]  # all of these are generators
            mx.clear_cache()  # the next turn's buffers have other sizes
            if answered:
                self.messages = [*messages, {"role": "assistant", "content": text}]
                self.said = [*self.said, parts]
                self.attached = []
                self._remember(tokens + answered, before)
                self._before_last = before if before.is_cheap else None
            else:
                before.restore()

    def _unread(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of the chat that the cache has not read yet."""
        if self.n_unknown and not self.messages:
            return mlx_lm_suffix(self.tokenizer, messages[-1]["content"])
        whole = self._rendered(messages, add_generation_prompt=True)
        held = self.read + self.pending_tokens
        if whole[: len(held)] == held:
            return whole[len(self.read) :]
        # The template renders earlier answers differently, or their tokens were not the usual ones for their text.
        earlier = self._rendered(self.messages, add_generation_prompt=False)
        return self.pending_tokens + whole[common_prefix([earlier, whole]) :]

    def _remember(self, tokens: list[int], before: Before) -> None:
        """Note which tokens the cache has read; with sparse attention that is without the answer.

        If a step was interrupted when some layers had been fed its token, that token is trimmed. Where it can't be, the
        caches are restored, and the next turn reads this one again.
        """
        sequence = self.read + tokens
        n = len(sequence)
        if not trimmed_to(n, self.prompt_cache):
            before.caches.restore()
            n = len(self.read)
        elif self.policy is not None:
            n = held_tokens(self.model, self.prompt_cache)
        self.read, self.pending_tokens = sequence[:n], sequence[n:]
