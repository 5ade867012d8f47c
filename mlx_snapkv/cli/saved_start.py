"""An answer that starts from a saved prompt."""

from datetime import datetime
from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import is_compressed, kv_bytes, layer_caches
from ..caches.matching import n_tokens
from ..caches.memories import book_memory
from ..chat.prompts import mlx_lm_suffix
from ..demo import MODELS
from ..engine.compress import compress_prompt_cache
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..planning.units import format_bytes
from ..policies import Method, Stages, method_named
from .prompts import encode_question


class SavedStart:
    """A saved prompt, loaded for a model, compressed if that is asked for, and continued by an answer.

    Args:
        file, name: the names that the user gave to it and the model.
        policy, memory, verify: of the answer. Without a memory the policy compresses a saved full cache at once.
        quantization: of a saved full cache's entries, if it is asked for; without a policy mlx-lm does it.

    Raises: SnapKVError: the file is not for this model, or its entries can't be compressed so.
    """

    def __init__(
        self,
        file: str,
        name: str,
        model,
        policy: Method | Stages | None,
        memory: str,
        verify: str | None,
        quantization: Quantization | None,
    ):
        self._file, self._saved = file, saved.load(file, model)
        self._caches = caches = self._saved.prompt_cache
        notes, policy_then = self._saved.notes, self._saved.policy
        saved_memory = book_memory(caches) or "drop"
        if self._saved.tokens is None:  # by mlx-lm, which notes a name alone
            theirs, here = str(notes.get("model", name)), MODELS.get(name, Path(name))
            if theirs != name and Path(theirs).resolve() != here.resolve():
                raise SnapKVError(f"{file} was made with --model {theirs}, not {name}")
        else:
            saved_memory = notes.get("memory", saved_memory)
        compressed = is_compressed(caches)
        if quantization and (compressed or any(c.quantization for c in layer_caches(caches))):
            how = "compressed" if compressed else "quantised"
            raise SnapKVError(f"{file} is already {how}, and its entries stay so: drop --kv-bits")
        is_sparse = policy is not None and not policy.evicts
        changes = {
            "--sparse": is_sparse,
            "--memory": memory != "drop" and not is_sparse,
            "the policy": policy if not is_sparse else None,
            "--verify": verify,
        }
        self.n_tokens = n_tokens(caches)
        self.report = CompressionReport(NO_POLICY, self.n_tokens, "the saved prompt is continued")
        if saved_memory != "drop" and policy_then != NO_POLICY and "messages" not in notes:
            if policy is not None:
                raise SnapKVError(
                    f"{file} has its own setting, {policy_then}: give none of your own"
                )
            policy = method_named(policy_then)
            memory = saved_memory if memory == "drop" else memory
        elif compressed and (what := " and ".join(name for name, x in changes.items() if x)):
            raise SnapKVError(
                f"{file} is already compressed, and the evicted entries are gone: drop {what}"
            )
        elif memory == "drop":
            if policy is not None:
                self.report = self._compress(model, policy, quantization)
            policy = None
        # Of the answer, with a book's own policy and memory unless others are given.
        self.options = {"policy": policy, "memory": memory, "prompt_cache": caches}

    def has(self, text: str) -> bool:
        """Whether a text to be read begins with the saved one."""
        saved_text = (self._saved.notes.get("text") or "").strip()
        return bool(saved_text) and text.lstrip().startswith(saved_text)

    def encode(self, tokenizer, question: str, ignore_chat_template: bool) -> list[int]:
        """Token ids of what follows the saved prompt; SnapKVError if the whole would not begin as that did."""
        file, notes = self._file, self._saved.notes
        if self._saved.tokens is None:
            return mlx_lm_suffix(tokenizer, question, ignore_chat_template)
        if ignore_chat_template:
            raise SnapKVError(
                "--ignore-chat-template can't be combined with --prompt-cache-file: drop it"
            )
        if "text" not in notes:
            raise SnapKVError(
                f"{file} holds no text to ask about: to continue a saved chat, use /load in mlx-snapkv chat"
            )
        today = datetime.fromisoformat(notes["time"])
        whole = encode_question(tokenizer, notes["text"], question, notes["system_prompt"], today)
        if whole[: self.n_tokens] != self._saved.tokens or len(whole) == self.n_tokens:
            raise SnapKVError(
                f"the prompt with this question does not begin with the tokens of {file}: "
                "if the tokenizer or its chat template has changed, save the prompt again"
            )
        return whole[self.n_tokens :]

    @property
    def policy(self) -> str:
        return self.report.policy if self.report.compressed else self._saved.policy

    @property
    def kept(self) -> str:
        """What the answer starts from, for the closing line."""
        entries = max(cache.n_entries for cache in layer_caches(self._caches))
        how = "full cache" if self.policy == NO_POLICY else self.policy
        is_reason = self.report.policy != NO_POLICY and not self.report.compressed
        why = f": {self.report.reason}" if is_reason else ""
        held = f"now {entries} entries, KV memory {format_bytes(kv_bytes(self._caches))}"
        return f"after {self.n_tokens} saved ones ({how}{why}), {held}"

    def to_dict(self) -> dict[str, Any]:
        return {"file": self._file, "tokens": self.n_tokens, "policy": self.policy}

    def _compress(
        self, model, policy: Method | Stages, quantization: Quantization | None
    ) -> CompressionReport:
        for stage in policy.stages:
            if stage.observes:
                raise SnapKVError(
                    f"{stage.name} needs queries, and a saved full cache holds none: add --memory recall, with which "
                    "the question chooses among the saved entries, or give --sparse, with which every token does"
                )
        if self.n_tokens < policy.min_ctx:
            reason = f"the saved prompt's {self.n_tokens} tokens are below min_ctx={policy.min_ctx}"
            return CompressionReport(str(policy), self.n_tokens, reason)
        return compress_prompt_cache(model, self._caches, policy, quantization=quantization)  # type: ignore[arg-type]
