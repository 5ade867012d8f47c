"""An answer that starts from a saved prompt."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import is_compressed, kv_bytes, layer_caches
from ..caches.matching import n_tokens
from ..chat.prompts import mlx_lm_suffix
from ..compress.options import Compress
from ..demo import MODELS
from ..engine.compress import compress_prompt_cache
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..planning.config import CompressionConfig
from ..planning.settings import setting_named
from ..planning.units import format_bytes
from ..sparse.prompt_caches import book_store
from .cache_options import CompressionOptions
from .prompts import encode_question


class SavedStart:
    """A saved prompt, loaded for a model, compressed if that is asked for, and continued by an answer.

    Args:
        file, name: the names that the user gave to it and the model.
        compression: of the answer, what was given. A policy compresses a saved full cache at once.
        quantization: of a saved full cache's entries, if it is asked for; without a policy mlx-lm does it.

    Raises: SnapKVError: the file is not for this model, or its entries can't be compressed so.
    """

    def __init__(
        self,
        file: str,
        name: str,
        model,
        compression: CompressionOptions,
        quantization: Quantization | None,
    ):
        policy, store, flag = compression.resolve(), compression.store, compression.flag
        self._file, self._saved, self._flag = file, saved.load(file, model), flag
        self._is_auto = compression.is_auto
        self._caches = caches = self._saved.prompt_cache
        if self._saved.tokens is None:  # by mlx-lm, which notes a name alone
            theirs, here = str(self._saved.notes.get("model", name)), MODELS.get(name, Path(name))
            if theirs != name and Path(theirs).resolve() != here.resolve():
                raise SnapKVError(f"{file} was made with --model {theirs}, not {name}")
        self.n_tokens = n_tokens(caches)
        self.report = CompressionReport(NO_POLICY, self.n_tokens, "the saved prompt is continued")
        compressed = is_compressed(caches)
        if quantization and (compressed or any(c.quantization for c in layer_caches(caches))):
            how = "compressed" if compressed else "quantised"
            raise SnapKVError(f"{file} is already {how}, and its entries stay so: drop --kv-bits")
        changes = {flag: policy, "--store": store}
        if self._stored_in is not None:
            self._require_nothing_else(policy, quantization)
            policy, store = setting_named(self._saved.policy), store or self._stored_in
        elif compressed and (what := " and ".join(name for name, x in changes.items() if x)):
            raise SnapKVError(
                f"{file} is already compressed, and the evicted entries are gone: drop {what}"
            )
        elif isinstance(policy, Compress):
            self.report = self._compress(model, policy, quantization)
            policy = None
        store = CompressionConfig(policy, store=store).store
        # Of the answer. What the text was read under goes before what is given, but for where entries stay.
        noted = {} if self._saved.tokens is None else self._saved.notes.get("options", {})
        own = {name: value for name, value in noted.items() if value is not None}
        self.options = {"policy": policy, **compression.keywords, **own}
        self.options |= {"store": store, "prompt_cache": caches}

    @property
    def _stored_in(self) -> str | None:
        """The store of a text whose entries all stay, for its own sparse attention to choose from; else None."""
        notes = self._saved.notes
        if self._saved.policy == NO_POLICY or "messages" in notes:
            return None
        stored = book_store(self._caches)
        return (
            stored if self._saved.tokens is None else notes.get("options", {}).get("store", stored)
        )

    def _require_nothing_else(self, policy: Any, quantization: Quantization | None) -> None:
        """Raises: SnapKVError: something is given that a file with a setting of its own has no use for."""
        own = f"{self._file} has its own setting, {self._saved.policy}"
        if policy is not None:
            raise SnapKVError(f"{own}: drop {self._flag}")
        if quantization is not None:
            raise SnapKVError(
                f"{own}, which evicts nothing: give --store 8bit or 4bit instead of --kv-bits"
            )

    def notes(self, text: str) -> Iterator[str]:
        """What does nothing of what was given, the text to be read among it."""
        if self._is_auto:
            yield f"note: --policy auto has no effect on {self._file}, which continues as saved"
        saved_text = (self._saved.notes.get("text") or "").strip()
        if saved_text and text.lstrip().startswith(saved_text):
            yield f"note: {self._file} already holds this text: give only the question"

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
        self, model, compress: Compress, quantization: Quantization | None
    ) -> CompressionReport:
        for policy in compress.policies:
            if policy.observes:
                raise SnapKVError(
                    f"{self._flag}: {policy.name} needs queries, and a saved full cache holds none: give --sparse, "
                    "with which every token chooses among the saved entries"
                )
        if self.n_tokens < (min_ctx := compress.policy.min_ctx):
            reason = f"the saved prompt's {self.n_tokens} tokens are below min_ctx={min_ctx}"
            return CompressionReport(str(compress), self.n_tokens, reason)
        return compress_prompt_cache(model, self._caches, compress, quantization=quantization)
