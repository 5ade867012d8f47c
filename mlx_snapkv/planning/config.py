"""The configuration of a request: its setting, and the options of mlx-lm that limit it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..entries.quantization import Quantization, extract_quantization
from ..errors import (
    ConflictError,
    Option,
    SnapKVError,
    UnknownOptionError,
    UnsupportedModelError,
)
from ..models import attentions, type_of
from ..models.distributed import TENSOR, split_of
from ..sparse.options import Sparse
from .prompt_plan import require_step_size
from .settings import Setting, resolve_setting

METHODS = ("snapkv", "policy", "sparse")
# Options of sparse attention, of which no keyword of mlx-lm or option of SnapKV has the name.
SPARSE_ONLY = set(Sparse.options()) - set(SnapKV.options())


@dataclass(frozen=True)
class CompressionConfig:
    """The setting of a request; see `generate_step`.

    Attributes:
        setting: a policy or sparse attention; None is the full cache.
        quantization: how the entries kept are quantised; None leaves them as they are.
        turns: whether caches that hold tokens already are compressed again, as a conversation's caches are.
        max_kv_size: mlx-lm's option, the size of a rotating cache.
        has_draft_model: whether mlx-lm's option `draft_model` is given.
        is_text: whether a text is read without an answer, for later questions.

    Raises: SnapKVError: an option of mlx-lm conflicts with sparse attention.
    """

    setting: Setting | None = None
    quantization: Quantization | None = None
    turns: bool = False
    max_kv_size: int | None = None
    has_draft_model: bool = False
    is_text: bool = False

    def __post_init__(self) -> None:
        """Check that no option of mlx-lm excludes sparse attention."""
        if self.sparse is None:
            return
        if self.quantization is not None:
            raise SnapKVError(
                "{} quantises the entries that a policy keeps, and {} keeps all: give {} or 4bit instead",
                Option("kv_bits"),
                Option("sparse"),
                Option("store", "8bit"),
            )
        if self.has_draft_model:
            raise ConflictError(Option("draft_model"), Option("sparse"))

    @classmethod
    def from_keywords(
        cls, keywords: dict[str, Any], **fields: Any
    ) -> tuple[CompressionConfig, dict[str, Any]]:
        """Return the config that the keywords of `generate_step` ask for, and the keywords that are mlx-lm's own.

        Args:
            keywords: keywords of `generate_step`, mlx-lm's own included.
            **fields: fields of the config that are no keywords, such as `turns`.

        Raises: SnapKVError: one is invalid or conflicts with another, or belongs into `sparse`.
        """
        for name, value in keywords.items():
            if name in SPARSE_ONLY:
                raise UnknownOptionError(
                    f"unknown option {name!r}: it is one of sparse attention, so give sparse={{{name!r}: {value!r}}}"
                )
        setting = resolve_setting(
            snapkv=keywords.get("snapkv"),
            policy=keywords.get("policy"),
            sparse=keywords.get("sparse"),
        )
        mlx_options = {name: value for name, value in keywords.items() if name not in METHODS}
        config = cls(setting=setting, **fields)
        return config.with_mlx_options(mlx_options), mlx_options

    def with_mlx_options(self, options: dict[str, Any]) -> CompressionConfig:
        """Return the config with the limits that mlx-lm's own options of `generate_step` set.

        Raises: SnapKVError: an option is invalid or conflicts with the config.
        """
        require_step_size(options.get("prefill_step_size"))
        quantization, _ = extract_quantization(options)
        return replace(
            self,
            quantization=quantization,
            max_kv_size=options.get("max_kv_size"),
            has_draft_model=options.get("draft_model") is not None,
        )

    @property
    def identity(self) -> dict[str, str]:
        """Return everything but the model and the tokens that entries depend on. A server finds prefixes by it."""
        return {"setting": str(self.setting), "quantization": str(self.quantization)}

    def __str__(self) -> str:
        """Return the setting as a command line takes it."""
        return str(self.setting or "the full cache")

    @property
    def flags(self) -> str:
        """Return the options of a command that ask for this; none for the full cache."""
        if self.setting is None:
            return ""
        if self.sparse is None:
            return f"--policy {shlex.quote(str(self.setting))}"
        options = str(self.sparse).partition(":")[2]
        # The flag needs a value, and this one is the default.
        return f"--sparse {shlex.quote(options or 'read=sparse')}"

    @property
    def compress(self) -> Compress | None:
        """Return the setting if it evicts entries."""
        return self.setting if isinstance(self.setting, Compress) else None

    @property
    def sparse(self) -> Sparse | None:
        """Return the setting if it is sparse attention."""
        return self.setting if isinstance(self.setting, Sparse) else None

    @property
    def store(self) -> str | None:
        """Return where sparse attention keeps all entries; None with a policy, which evicts."""
        return None if self.sparse is None else self.sparse.store

    @property
    def evicts_in_blocks(self) -> bool:
        """Return whether entries are evicted while a prompt is read."""
        return self.compress is not None and self.compress.evicts_in_blocks

    def require(self, model) -> None:
        """Raise SnapKVError if the model does not support the setting."""
        if self.sparse is not None:
            _require_sparse_support(model)
        self._require_heads(model)

    def require_compressible(self) -> None:
        """Raise SnapKVError if mlx-lm's options exclude the compression of a prompt; off, they may be combined."""
        if self.max_kv_size is not None:
            raise ConflictError(Option("max_kv_size"), "a policy or sparse attention")
        if not self.has_draft_model:
            return
        if self.quantization is not None:
            raise SnapKVError(
                "a draft model can't check quantised entries exactly: drop {}", Option("kv_bits")
            )
        if self.compress is not None and not self.compress.decode_policy.grows:
            raise SnapKVError(
                "a draft model needs a cache that only grows after the prompt, and {} goes on evicting: use snapkv "
                "with on_full=grow, or drop {}",
                self.compress.decode_policy,
                Option("draft_model"),
            )

    def _require_heads(self, model) -> None:
        """Raise SnapKVError if a policy compares all heads of a layer, and several Macs share them."""
        policies = () if self.compress is None else self.compress.policies
        agreeing = [policy for policy in policies if policy.heads_agree]
        if agreeing and split_of(model) == TENSOR:
            raise SnapKVError(
                "{} keeps the same entries in all heads of a layer, which several Macs share here: "
                "give each Mac whole layers (--pipeline), or choose another policy",
                agreeing[0].name,
            )


def _require_sparse_support(model) -> None:
    """Raise UnsupportedModelError if a layer of a model can't choose which entries its tokens read."""
    owners = attentions(model)
    reason = next((owner.family.no_sparse for owner in owners if owner.family.no_sparse), None)
    if reason is None and all(owner.borrowers for owner in owners):
        reason = "other layers read the entries of all its layers"
    if reason is not None:
        raise UnsupportedModelError(
            f"sparse attention is not possible on model type {type_of(model)!r}: {reason}. "
            "Give a policy, such as snapkv"
        )
