"""An answer that starts from a saved prompt."""

from datetime import datetime
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from .. import saved
from ..caches.layers import attention_layers, is_compressed, kv_bytes, layer_caches
from ..caches.matching import n_tokens
from ..caches.memories import book_memory
from ..caches.quantizable import require_quantizable
from ..chat.continuation import mlx_lm_suffix
from ..demo import MODELS
from ..engine.compress import compress_prompt_cache
from ..engine.report import NO_POLICY, CompressionReport, format_bytes
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..policies import POLICIES, Policy, Stages, resolve_policy
from .opening import conversation


class SavedStart:
    """A saved prompt, loaded for a model and compressed if a policy is given.

    Args:
        file: the name that the user gave.
        name: the model's name, as the user gave it.
        model: the model of that name.
        policy: how to compress a saved full cache.
        quantization: of a saved full cache's entries, if it is asked for; without a policy mlx-lm does it.

    Attributes:
        prompt_cache: what the answer continues.
        report: what compressing it on loading did.
        memory: of a book, what it was saved with; else "drop".

    Raises:
        SnapKVError: the file is not for this model, or its entries can't be compressed so.
    """

    def __init__(
        self,
        file: str,
        name: str,
        model,
        policy: Policy | Stages | None,
        quantization: Quantization | None,
    ):
        self._file = file
        self._saved = saved.load(file, model)
        self.prompt_cache = self._saved.prompt_cache
        if self._saved.tokens is None:
            _require_name(file, name, self._saved.notes.get("model"))
        self._is_compressed = is_compressed(self.prompt_cache)
        quantised = any(cache.quantization for cache in layer_caches(self.prompt_cache))
        if quantization is not None and (self._is_compressed or quantised):
            how = "compressed" if self._is_compressed else "quantised"
            raise SnapKVError(
                f"{file} is {how} already, its entries stay as they are: drop --kv-bits"
            )
        self.n_tokens = n_tokens(self.prompt_cache)
        self.report = CompressionReport(NO_POLICY, self.n_tokens, "the saved prompt is continued")
        self.memory = self._memory
        if policy is not None and self.memory == "drop":
            self.report = self._compress(model, policy, quantization)

    def ways(self, policy: Policy | Stages | None, memory: str) -> tuple:
        """The policy and memory of the answer: those that were given, or a book's own.

        Raises:
            SnapKVError: a policy is given for a book, which has one.
        """
        if self.memory == "drop" or self._saved.policy == NO_POLICY:
            return policy, memory
        if policy is not None:
            raise SnapKVError(
                f"{self._file} is a book, saved with the policy {self._saved.policy}: drop the policy"
            )
        own = resolve_policy(policy=self._saved.policy)
        return own, self.memory if memory == "drop" else memory

    @property
    def _memory(self) -> str:
        noted = self._saved.notes if self._saved.tokens is not None else {}
        if "messages" in noted:  # no answer starts from those
            return "drop"
        return noted.get("memory") or book_memory(self.prompt_cache) or "drop"

    def encode(self, tokenizer, question: str, ignore_chat_template: bool) -> list[int]:
        """Token ids of what follows the saved prompt.

        Raises:
            SnapKVError: the whole conversation would not begin as the saved one did.
        """
        if self._saved.tokens is None:
            return mlx_lm_suffix(tokenizer, question, ignore_chat_template)
        if ignore_chat_template:
            raise SnapKVError("--ignore-chat-template is settled by --prompt-cache-file: drop it")
        notes = self._saved.notes
        if "messages" in notes:
            raise SnapKVError(
                f"{self._file} holds a conversation: go on with it in mlx-snapkv chat, by /load"
            )
        if "text" not in notes:
            raise SnapKVError(
                f"{self._file} was saved without its text: only mlx-snapkv cache-prompt's files go on here"
            )
        today = datetime.fromisoformat(notes["time"])
        whole = conversation(tokenizer, notes["text"], question, notes["system_prompt"], today)
        if whole[: self.n_tokens] != self._saved.tokens or len(whole) == self.n_tokens:
            raise SnapKVError(
                f"with this question the prompt does not begin with the tokens of {self._file}: "
                "if the tokenizer or its chat template has changed, save the prompt again"
            )
        return whole[self.n_tokens :]

    @property
    def policy(self) -> str:
        return self.report.policy if self.report.compressed else self._saved.policy

    @property
    def kept(self) -> str:
        """What the answer starts from, for the closing line."""
        entries = max(cache.n_entries for cache in layer_caches(self.prompt_cache))
        how = "full cache" if self.policy == NO_POLICY else self.policy
        asked = self.report.policy != NO_POLICY and not self.report.compressed
        why = f": {self.report.reason}" if asked else ""
        size = format_bytes(kv_bytes(self.prompt_cache))
        held = f"now {entries} entries, KV memory {size}"
        return f"after {self.n_tokens} saved ones ({how}{why}), {held}"

    def to_dict(self) -> dict[str, Any]:
        return {"file": self._file, "tokens": self.n_tokens, "policy": self.policy}

    def _compress(
        self, model, policy: Policy | Stages, quantization: Quantization | None
    ) -> CompressionReport:
        """Compress the full cache by a policy that needs no queries."""
        if self._is_compressed:
            raise SnapKVError(
                f"{self._file} is already compressed, by {self._saved.policy}: drop the policy"
            )
        if isinstance(policy, Stages):
            raise SnapKVError("a saved full cache is compressed by one policy, not by two stages")
        if policy.observes:
            others = ", ".join(n for n, cls in POLICIES.items() if not cls().observes)
            raise SnapKVError(
                f"a saved full cache holds no queries for {policy.name} to vote with: "
                f"save the prompt with the policy, or take one of {others}"
            )
        if self.n_tokens < policy.min_ctx:
            reason = f"the saved prompt's {self.n_tokens} tokens are below min_ctx={policy.min_ctx}"
            return CompressionReport(str(policy), self.n_tokens, reason)
        if quantization is not None:
            fresh = make_prompt_cache(model)
            require_quantizable(model, attention_layers(model, fresh), quantization)
        return compress_prompt_cache(model, self.prompt_cache, policy, quantization=quantization)


def _require_name(file: str, name: str, made_with: str | None) -> None:
    """Raises: SnapKVError: mlx-lm saved the prompt with a model of another name."""
    folder = MODELS.get(name, Path(name))
    if made_with not in (None, name) and Path(str(made_with)).resolve() != folder.resolve():
        raise SnapKVError(f"{file} was made with --model {made_with}, not with {name}")
