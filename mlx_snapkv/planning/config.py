"""The configuration of a request: its setting, and the mlx-lm options that affect it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..entries.quantization import Quantization, requested_quantization
from ..errors import (
    ConflictError,
    Option,
    SnapKVError,
    UnknownOptionError,
    UnsupportedModelError,
)
from ..models import cache_owners, type_of
from ..models.distributed import TENSOR, split_of
from ..sparse.options import Sparse
from .prompt_plan import require_step_size
from .settings import Setting, resolve_setting

SETTING_KEYWORDS = ("snapkv", "policy", "sparse")
# Options that exist only for sparse attention, not for SnapKV or mlx-lm.
SPARSE_ONLY_OPTIONS = set(Sparse.options()) - set(SnapKV.options())


@dataclass(frozen=True)
class CompressionConfig:
    """The configuration of a request; see `generate_step`.

    Attributes:
        setting: policies or sparse attention, or None for the full cache.
        quantization: quantisation of the kept entries. If None, they stay as they are.
        turns: whether to compress prompt caches that already contain tokens, as in a conversation.
        max_kv_size: mlx-lm's `max_kv_size`, the size of a rotating cache. None if it is not set.
        has_draft_model: whether mlx-lm's `draft_model` is set.
        is_text: whether the prompt is a text to read now, without an answer. Questions about it follow later.

    Raises: SnapKVError: an mlx-lm option conflicts with sparse attention.
    """

    setting: Setting | None = None
    quantization: Quantization | None = None
    turns: bool = False
    max_kv_size: int | None = None
    has_draft_model: bool = False
    is_text: bool = False

    def __post_init__(self) -> None:
        """Check that no mlx-lm option conflicts with sparse attention."""
        if self.sparse is None:
            return
        if self.quantization is not None:
            raise SnapKVError(
                "{} quantises the entries that a policy keeps, and {} keeps all: give {} instead",
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
        """Split the keyword arguments of `generate_step` into a config and mlx-lm's options.

        Args:
            keywords: keyword arguments of `generate_step`, including those for mlx-lm.
            **fields: fields that `generate_step` has no argument for, such as `turns`.

        Raises: SnapKVError: an option is invalid, conflicts with another, or belongs in `sparse`.
        """
        for name, value in keywords.items():
            if name in SPARSE_ONLY_OPTIONS:
                raise UnknownOptionError(
                    f"unknown option {name!r}: it is one of sparse attention, so give sparse={{{name!r}: {value!r}}}"
                )
        setting = resolve_setting(
            snapkv=keywords.get("snapkv"),
            policy=keywords.get("policy"),
            sparse=keywords.get("sparse"),
        )
        mlx_options = {
            name: value for name, value in keywords.items() if name not in SETTING_KEYWORDS
        }
        config = cls(setting=setting, **fields)
        return config.with_mlx_options(mlx_options), mlx_options

    def with_mlx_options(self, options: dict[str, Any]) -> CompressionConfig:
        """Return a copy of the config that takes mlx-lm's options into account.

        Raises: SnapKVError: an option is invalid or conflicts with the config.
        """
        require_step_size(options.get("prefill_step_size"))
        return replace(
            self,
            quantization=requested_quantization(options),
            max_kv_size=options.get("max_kv_size"),
            has_draft_model=options.get("draft_model") is not None,
        )

    @property
    def identity(self) -> dict[str, str]:
        """Return everything that cached entries depend on besides the model and the tokens.

        A server uses it as part of the key for cached prefixes.
        """
        return {"setting": str(self.setting), "quantization": str(self.quantization)}

    def __str__(self) -> str:
        """Return the setting's string form, or "the full cache"."""
        return str(self.setting or "the full cache")

    @property
    def flags(self) -> str:
        """Return the command-line options that select this setting, or "" for the full cache."""
        if self.setting is None:
            return ""
        if self.sparse is None:
            return f"--policy {shlex.quote(str(self.setting))}"
        _, _, sparse_options = str(self.sparse).partition(":")  # from "sparse:OPTIONS"
        # The flag requires a value, so pass a default explicitly.
        return f"--sparse {shlex.quote(sparse_options or 'when=faster')}"

    @property
    def compress(self) -> Compress | None:
        """Return the setting if it evicts entries, otherwise None."""
        return self.setting if isinstance(self.setting, Compress) else None

    @property
    def sparse(self) -> Sparse | None:
        """Return the setting if it is sparse attention, otherwise None."""
        return self.setting if isinstance(self.setting, Sparse) else None

    @property
    def store(self) -> str | None:
        """Return the `store` of sparse attention, or None for any other setting."""
        return None if self.sparse is None else self.sparse.store

    @property
    def store_dir(self) -> str | None:
        """Return the folder for the store's files, or None for TMPDIR."""
        return None if self.sparse is None else self.sparse.store_dir

    @property
    def evicts_in_blocks(self) -> bool:
        """Return whether entries are evicted during prefill."""
        return self.compress is not None and self.compress.evicts_in_blocks

    def require_supported(self, model) -> None:
        """Check that the model supports the setting. Raises: SnapKVError."""
        if self.sparse is not None:
            _require_sparse_support(model)
        self._require_unsplit_heads(model)

    def require_compressible(self) -> None:
        """Check that no mlx-lm option rules out compression or sparse attention. Raises: SnapKVError.

        Requests that are left to mlx-lm can use all its options, so they don't need this check.
        """
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

    def _require_unsplit_heads(self, model) -> None:
        """If several Macs share a layer's heads, check that no policy needs all of these heads.

        Raises: SnapKVError.
        """
        policies = () if self.compress is None else self.compress.policies
        for policy in policies:
            if policy.heads_agree and split_of(model) == TENSOR:
                raise SnapKVError(
                    "{} keeps the same entries in all heads of a layer, which several Macs share here: "
                    "give each Mac whole layers (--pipeline), or choose another policy",
                    policy.name,
                )


def _require_sparse_support(model) -> None:
    """Check that the model supports sparse attention.

    The model does not support it if an attention class rules it out, or if every layer lends its entries to other
    layers.

    Raises: UnsupportedModelError.
    """
    owners = cache_owners(model)
    reasons = [owner.family.no_sparse for owner in owners if owner.family.no_sparse]
    if all(owner.borrowers for owner in owners):
        reasons.append("other layers read the entries of all its layers")
    if reasons:
        raise UnsupportedModelError(
            f"sparse attention is not possible on model type {type_of(model)!r}: {reasons[0]}. "
            "Give a policy, such as snapkv"
        )
