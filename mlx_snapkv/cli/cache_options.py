"""The options of KV caches, each declared once: how entries are stored, which are kept, what becomes of the rest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError, UnsupportedModelError
from ..paths import path_of
from .command import in_flags, option
from .options import n_bytes, one_of

if TYPE_CHECKING:
    from ..entries.quantization import Quantization
    from ..policies import Policy, Stages

PrefillStepSize = Annotated[int, Option(min=1, help="Prompt tokens read at a time, at most.")]
Snapkv = Annotated[str | None, Option(help='SnapKV with these options, such as "top_k=1024".')]


@dataclass(frozen=True)
class CacheOptions:
    """How a prompt is read, and how its entries are stored."""

    prefill_step_size: PrefillStepSize = 2048
    kv_group_size: int = option(
        "Values that share a scale: 32, 64 or 128.", 64, parser=one_of(32, 64, 128)
    )
    kv_bits: int | None = option(
        "Bits of the entries: 2, 3, 4, 6 or 8.", parser=one_of(2, 3, 4, 6, 8)
    )

    @property
    def quantization(self) -> Quantization | None:
        from ..entries.quantization import Quantization

        return None if self.kv_bits is None else Quantization(self.kv_bits, self.kv_group_size)

    def require(self, model: Any) -> None:
        """Raises: SnapKVError: the model's entries can't be quantised so."""
        from mlx_lm.models.cache import make_prompt_cache

        from ..caches.layers import attention_layers, require_quantizable

        if self.quantization is None:
            return
        try:
            layers = attention_layers(model, make_prompt_cache(model))
        except UnsupportedModelError:  # whose entries are mlx-lm's alone
            return
        require_quantizable(model, layers, self.quantization)


@dataclass(frozen=True)
class MLXCacheOptions(CacheOptions):
    """The same with mlx-lm's options of a full cache."""

    max_kv_size: int | None = option(
        "Entries of mlx-lm's rotating cache, of models that make no caches of their own.", min=1
    )
    quantized_kv_start: int | None = option(
        "Tokens from which --kv-bits counts, without a policy; mlx-lm's 5000.", min=0
    )

    def generation(self, policy: Policy | Stages | None) -> dict[str, Any]:
        """The same as options of `stream_generate`; SnapKVError if one has no effect on a policy's entries."""
        if self.quantized_kv_start is not None and policy is not None:
            raise SnapKVError(
                "--quantized-kv-start is for the full cache: a policy's entries are quantised when they are "
                "compressed; drop it or the policy"
            )
        return {k: v for k, v in vars(self).items() if k != "quantized_kv_start" or v is not None}

    def require(self, model: Any, draft_model: str | None = None) -> None:
        """Raises: SnapKVError: the model has no such cache, or mlx-lm would ignore an option beside it."""
        from ..models import type_of

        super().require(model)
        if self.max_kv_size is not None and hasattr(model, "make_cache"):
            raise SnapKVError(
                f"--max-kv-size has no effect on {type_of(model)} models, since they make their own caches: drop it, "
                f"or limit the entries with --policy streaming_llm:budget={self.max_kv_size}"
            )
        for flag, given in (("--draft-model", draft_model), ("--kv-bits", self.kv_bits)):
            if self.max_kv_size is not None and given is not None:
                raise SnapKVError(f"--max-kv-size can't be combined with {flag}: drop one")


def each_policy(policy: Iterable[str] | None, snapkv: str | None = None) -> list[Policy | Stages]:
    """That of --snapkv, and those of every --policy. Raises: SnapKVError: one can't be read."""
    from ..policies import resolve_policy

    given = [resolve_policy(snapkv), *(resolve_policy(policy=text) for text in policy or [])]
    return [each for each in given if each is not None]


@dataclass(frozen=True)
class PolicyOptions:
    """The policy that compresses prompts, if any does."""

    snapkv: Snapkv = None
    policy: str | None = option('Any of mlx-snapkv policies, such as "keydiff:budget=25%".')

    def resolve(self) -> Policy | Stages | None:
        """The policy; SnapKVError for a mistake in it, or for two."""
        from ..policies import resolve_policy

        return resolve_policy(self.snapkv, self.policy)


@dataclass(frozen=True)
class AutoPolicyOptions(PolicyOptions):
    """The same, or what suits the prompt and the machine."""

    policy: str | None = option(
        'Any policy, such as "keydiff:budget=25%" (see mlx-snapkv policies); or auto, which takes what '
        "suits the prompt, the task and this machine."
    )
    kv_memory: int | None = option(
        "KV memory for --policy auto, as 2GB.", parser=n_bytes, metavar="SIZE"
    )

    @property
    def is_auto(self) -> bool:
        from ..policies import asks_for_auto

        return asks_for_auto(self.snapkv, self.policy)

    def resolve(self) -> Policy | Stages | None:
        """The policy; None as long as it is to be taken."""
        return None if self.is_auto else super().resolve()


@dataclass(frozen=True)
class MemoryOptions:
    memory: str = option(
        "Entries that are not kept: gone (drop), or all at hand for later turns and --refresh: in memory "
        "(recall, recall:8bit, recall:4bit) or in files (recall:file, recall:file:8bit, recall:file:4bit). A "
        "policy that evicts while it reads, such as keydiff, then reads within its budget.",
        "drop",
    )
    store_dir: Path | None = option("Folder of --memory recall:file; by default TMPDIR.")
    far: str | None = option(
        "Entries farther away than the model was trained to: turned as if they were nearer (pull), or left where they "
        "are (keep). Without it, pulled if the prompt is longer than that, and the policy evicts while it is read."
    )

    def __post_init__(self):
        self.require_valid()
        if self.store_dir is None:
            return
        folder = path_of(self.store_dir, "--store-dir")
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise SnapKVError(f"--store-dir {folder} is no folder that files can be written to")
        tempfile.tempdir = str(folder)

    def require_valid(self) -> None:
        """Raises: SnapKVError: an option is invalid or conflicts with another."""
        from ..planning.config import CompressionConfig

        CompressionConfig(**self.retention())

    def retention(self) -> dict[str, Any]:
        """The same as keywords of `stream_generate`, `Conversation` and batches."""
        from ..planning.config import RETENTION

        return {name: x for name, x in vars(self).items() if name in RETENTION}


@dataclass(frozen=True)
class RetentionOptions(MemoryOptions):
    """The same, and what an answer does with these entries."""

    verify: str | None = option(
        "all: drafted, and checked on all entries that --memory keeps: the full cache's answer."
    )
    refresh: str = option(
        "With --memory, when an answer chooses which entries it reads: at every token (token), or once for "
        "the whole answer, which is faster and farther from the full cache's (turn): docs/recall.md.",
        "token",
    )


@dataclass(frozen=True)
class CompressionOptions(RetentionOptions, AutoPolicyOptions):
    """The policy, or what suits the prompt and the machine, and what becomes of what it does not keep."""

    def require_valid(self) -> None:
        if not self.is_auto:
            super().require_valid()
            return
        from ..planning.auto import require_for_auto

        require_for_auto(self.retention())

    def keywords(self) -> dict[str, Any]:
        return {"policy": self.resolve(), **self.retention()}

    def take(
        self,
        model: Any,
        n_prompt: int | None,
        task: str,
        say: Callable[[str], None],
        given: dict[str, Any],
        **how: Any,
    ) -> dict[str, Any]:
        """What --policy auto changes of them, said in one line; a model's name will do.

        Beside what is `given` as options of mlx-lm's, the arguments are those of `resolve`.
        """
        from ..planning.auto import resolve
        from .loading import load_without_weights, require_alone

        if not self.is_auto:
            return {}
        require_alone(policy=self.policy)
        model = load_without_weights(model) if isinstance(model, str) else model
        how |= {"policy": self.policy, "kv_memory": self.kv_memory}
        config, _, taken = resolve(model, n_prompt, task, given | self.retention(), **how)
        say(in_flags(str(taken)))
        return {"policy": config.policy, **config.retention}
