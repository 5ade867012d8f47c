"""Load a saved prompt, so that an answer can continue from it."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import is_compressed, kv_bytes, layer_caches, memory_bytes, n_tokens
from ..chat.prompts import mlx_lm_suffix
from ..compress.options import Compress
from ..demo import MODELS
from ..engine.compress import compress_prompt_cache
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import Quantization
from ..errors import Option, SnapKVError
from ..planning.config import CompressionConfig
from ..planning.entry_sizes import weight_bytes
from ..planning.kv_limit import NO_KV_LIMIT
from ..planning.machine import this_machine
from ..planning.settings import Setting, setting_named
from ..planning.units import format_bytes
from ..sparse.options import Sparse
from .cache_options import CompressionOptions
from .prompts import encode_question


class SavedPrompt:
    """A prompt saved by cache-prompt or mlx-lm.

    Loading checks that the prompt fits the model, and compresses a full cache if a policy is set.

    Args:
        file: file name as typed by the user.
        name: model name as typed by the user.
        model: the loaded model.
        compression: compression options for the answer. A policy compresses a saved full cache as it is loaded.
        quantization: quantisation of the entries that a policy keeps from a saved full cache. Without a policy, mlx-lm
            quantises the cache.

    Attributes:
        n_tokens: length of the saved prompt in tokens.
        report: report on the compression during loading.
        options: `stream_generate` keywords for the answer.

    Raises: SnapKVError: the file can't be loaded, is for another model, or can't be used with these options.
    """

    def __init__(
        self,
        file: str,
        name: str,
        model,
        compression: CompressionOptions,
        quantization: Quantization | None,
    ):
        """Load the file, check the options, and compress a full cache if a policy is set."""
        requested_setting = compression.resolve()
        self._file = file
        self._model = model
        self._saved = saved.load(file, model, store_dir=compression.store_dir)
        self._compression = compression
        self._caches = self._saved.prompt_cache
        if self._saved.is_from_mlx_lm:
            self._require_model(name)
        self.n_tokens = n_tokens(self._caches)
        self.report = CompressionReport(NO_POLICY, self.n_tokens, "the saved prompt is continued")
        if quantization is not None:
            self._require_full_precision()
        answer_setting: Setting | None = None  # None continues from the caches as they are
        saved_sparse = self._saved_sparse
        if saved_sparse is not None:
            self._require_no_other_setting(requested_setting, quantization)
            answer_setting = replace(saved_sparse, **compression.flag_values)
        elif is_compressed(self._caches):
            self._require_no_setting(requested_setting)
        else:
            answer_setting = compression.apply_to(requested_setting)
            if isinstance(answer_setting, Compress):
                self.report = self._compress(model, answer_setting, quantization)
                answer_setting = None
        self.options: dict[str, Any] = {"policy": answer_setting, "prompt_cache": self._caches}

    def _require_model(self, name: str) -> None:
        """Check that mlx-lm saved the file with a model of this name. Raises: SnapKVError."""
        name_in_file = str(self._saved.notes.get("model", name))
        folder = MODELS.get(name, Path(name))
        if name_in_file != name and Path(name_in_file).resolve() != folder.resolve():
            raise SnapKVError(f"{self._file} was made with --model {name_in_file}, not {name}")

    def _require_full_precision(self) -> None:
        """Check that the entries are neither compressed nor quantised, as --kv-bits requires. Raises: SnapKVError."""
        if is_compressed(self._caches):
            state = "compressed"
        elif any(cache.quantization for cache in layer_caches(self._caches)):
            state = "quantised"
        else:
            return
        raise SnapKVError(
            f"{self._file} is already {state}, and its entries stay so: drop --kv-bits"
        )

    def _require_no_setting(self, setting: Setting | None) -> None:
        """Reject settings and stores for entries that are already compressed. Raises: SnapKVError."""
        flags = []
        if setting is not None:
            flags.append(self._compression.flag)
        if self._compression.store is not None:
            flags.append("--store")
        if flags:
            raise SnapKVError(
                f"{self._file} is already compressed, and the evicted entries are gone: drop {' and '.join(flags)}"
            )

    @property
    def _saved_sparse(self) -> Sparse | None:
        """Return the sparse attention setting that a text was saved with, or None for other files."""
        if self._saved.policy == NO_POLICY or "messages" in self._saved.notes:
            return None
        setting = setting_named(self._saved.policy)
        return setting if isinstance(setting, Sparse) else None

    def _require_no_other_setting(
        self, setting: Setting | None, quantization: Quantization | None
    ) -> None:
        """Reject any setting, and --kv-bits, for a file that has its own setting. Raises: SnapKVError."""
        conflict = f"{self._file} has its own setting, {self._saved.policy}"
        if setting is not None:
            raise SnapKVError(f"{conflict}: drop {self._compression.flag}")
        if quantization is not None:
            raise SnapKVError(
                f"{conflict}, which evicts nothing: give --store 8bit instead of --kv-bits"
            )

    def notes(self, text: str) -> Iterator[str]:
        """Yield a note if --policy auto is set, and one if `text` repeats the saved text."""
        if self._compression.is_auto:
            yield f"note: --policy auto has no effect on {self._file}, which continues as saved"
        saved_text = (self._saved.notes.get("text") or "").strip()
        if saved_text and text.lstrip().startswith(saved_text):
            yield f"note: {self._file} already holds this text: give only the question"

    def encode(self, tokenizer, question: str, ignore_chat_template: bool) -> list[int]:
        """Encode a question as token ids that continue the saved prompt.

        Raises: SnapKVError: the prompt with the question does not begin with the saved tokens, or the file does not
            support questions or `ignore_chat_template`.
        """
        if self._saved.is_from_mlx_lm:
            return mlx_lm_suffix(tokenizer, question, ignore_chat_template)
        if ignore_chat_template:
            raise SnapKVError(
                "--ignore-chat-template can't be combined with --prompt-cache-file: drop it"
            )
        notes = self._saved.notes
        if "text" not in notes:
            raise SnapKVError(
                f"{self._file} holds no text to ask about: to continue a saved chat, use /load in mlx-snapkv chat"
            )
        today = datetime.fromisoformat(notes["time"])
        prompt = encode_question(tokenizer, notes["text"], question, notes["system_prompt"], today)
        saved_tokens, question_tokens = prompt[: self.n_tokens], prompt[self.n_tokens :]
        if saved_tokens != self._saved.tokens or not question_tokens:
            raise SnapKVError(
                f"the prompt with this question does not begin with the tokens of {self._file}: "
                "if the tokenizer or its chat template has changed, save the prompt again"
            )
        return question_tokens

    def require_memory(self, max_kv_bytes: int | None) -> None:
        """Check that the model and the saved entries fit in memory together.

        The question and the answer are not counted, because they are usually much shorter than the saved text.

        If the answer's store is "8bit" or "file", nothing is checked, because the entries move to that store
        one layer at a time.

        Args:
            max_kv_bytes: KV memory limit in bytes. 0 turns off the check. None means this machine's memory.

        Raises: SnapKVError: they do not fit.
        """
        moves_entries = CompressionConfig(self.options["policy"]).store not in (None, "memory")
        if moves_entries or max_kv_bytes == NO_KV_LIMIT:
            return
        saved_bytes = memory_bytes(self._caches)
        if max_kv_bytes is not None:
            if saved_bytes > max_kv_bytes:
                raise SnapKVError(
                    "{} takes {} of KV memory, but {} is {}: raise it",
                    self._file,
                    format_bytes(saved_bytes),
                    Option("max_kv_bytes"),
                    format_bytes(max_kv_bytes),
                )
            return
        needed_bytes = saved_bytes + weight_bytes(self._model)
        usable = this_machine().usable
        if needed_bytes > usable:
            raise SnapKVError(
                "{} and the model take {}, but this machine has {} for models; {} answers anyway",
                self._file,
                format_bytes(needed_bytes),
                format_bytes(usable),
                Option("max_kv_bytes", str(NO_KV_LIMIT)),
            )

    @property
    def policy(self) -> str:
        """Return the setting that compressed the prompt when it was loaded.

        If none did, return the setting in the file, which may be `NO_POLICY`.
        """
        return self.report.policy if self.report.compressed else self._saved.policy

    @property
    def kept_text(self) -> str:
        """Describe the entries that the answer starts from, for the closing line."""
        setting_text = "full cache" if self.policy == NO_POLICY else self.policy
        has_policy_without_effect = self.report.policy != NO_POLICY and not self.report.compressed
        if has_policy_without_effect:
            setting_text += f": {self.report.reason}"
        n_entries = max(cache.n_entries for cache in layer_caches(self._caches))
        cache_text = f"now {n_entries} entries, KV memory {format_bytes(kv_bytes(self._caches))}"
        return f"after {self.n_tokens} saved ones ({setting_text}), {cache_text}"

    def to_dict(self) -> dict[str, Any]:
        """Return the `prompt_cache` entry of the JSON object for --json."""
        return {"file": self._file, "tokens": self.n_tokens, "policy": self.policy}

    def _compress(
        self, model, compress: Compress, quantization: Quantization | None
    ) -> CompressionReport:
        """Compress the saved full cache and return a report.

        Raises: SnapKVError: a policy needs queries, which are not saved.
        """
        for policy in compress.policies:
            if policy.observes:
                raise SnapKVError(
                    f"{self._compression.flag}: {policy.name} needs queries, and a saved full cache holds none: "
                    "give --sparse, with which every token chooses among the saved entries"
                )
        return compress_prompt_cache(model, self._caches, compress, quantization=quantization)
