"""The configuration of a request: its setting, its options, and the options of mlx-lm that limit them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from ..compress.options import Compress
from ..entries.quantization import Quantization, extract_quantization
from ..errors import (
    SnapKVError,
    UnsupportedModelError,
)
from ..models import attentions, type_of
from ..models.distributed import TENSOR, split_of
from ..paths import path_of
from ..sparse.options import Sparse
from ..sparse.prompt_caches import require_store
from .exclusions import When, require_compatible
from .options import OPTIONS, RequestOptions, noted
from .prompt_plan import require_step_size
from .settings import Setting, resolve_setting

METHODS = ("snapkv", "policy", "sparse")


@dataclass(frozen=True)
class CompressionConfig(RequestOptions):
    """The setting and the options of a request; see `generate_step`.

    Attributes:
        store: where sparse attention keeps all entries, by default "memory"; None with a policy, which evicts.
        setting: a policy or sparse attention; None is the full cache.
        quantization: how the entries kept are quantised; None leaves them as they are.
        turns: whether caches that hold tokens already are compressed again, as a conversation's caches are.
        max_kv_size: mlx-lm's option, the size of a rotating cache, which excludes compression.
        has_draft_model: whether mlx-lm's option `draft_model` is given.
        is_text: whether a text is read without an answer, for later questions.

    Raises: SnapKVError: an option is invalid or conflicts with another.
    """

    setting: Setting | None = None
    quantization: Quantization | None = None
    turns: bool = False
    max_kv_size: int | None = None
    has_draft_model: bool = False
    is_text: bool = False

    def __post_init__(self) -> None:
        """Set the store that sparse attention needs, and check the options against each other."""
        super().__post_init__()
        if self.store is None and self.sparse is not None:
            object.__setattr__(self, "store", "memory")
        if self.store_dir is not None:
            object.__setattr__(self, "store_dir", str(path_of(self.store_dir, "--store-dir")))
        require_store(self.store, self.store_dir)
        require_compatible(self, When.GIVEN)

    @classmethod
    def from_keywords(
        cls, keywords: dict[str, Any], **fields: Any
    ) -> tuple[CompressionConfig, dict[str, Any]]:
        """Return the config that the keywords of `generate_step` ask for, and the keywords that are mlx-lm's own.

        Args:
            keywords: keywords of `generate_step`, mlx-lm's own included.
            **fields: fields of the config that are no keywords, such as `turns`.

        Raises: SnapKVError: one is invalid or conflicts with another.
        """
        setting = resolve_setting(
            snapkv=keywords.get("snapkv"),
            policy=keywords.get("policy"),
            sparse=keywords.get("sparse"),
        )
        own_options = {name: keywords[name] for name in OPTIONS if name in keywords}
        mlx_options = {
            name: value for name, value in keywords.items() if name not in (*METHODS, *OPTIONS)
        }
        config = cls(setting=setting, **own_options, **fields)
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
        values = {"setting": self.setting, "quantization": self.quantization}
        values |= noted(self.keywords)
        return {name: str(value) for name, value in values.items()}

    def __str__(self) -> str:
        """Return the setting as a command line takes it, and the store if it is not memory."""
        store = "" if self.store in (None, "memory") else f", store {self.store}"
        return f"{self.setting or 'the full cache'}{store}"

    @property
    def flags(self) -> str:
        """Return the options of a command that ask for this; none for the full cache."""
        if self.setting is None:
            return ""
        if self.sparse is None:
            flags = f"--policy {shlex.quote(str(self.setting))}"
        else:
            options = str(self.sparse).partition(":")[2]
            # The flag needs a value, and this one is the default.
            flags = f"--sparse {shlex.quote(options or 'read=sparse')}"
        return flags if self.store in (None, "memory") else f"{flags} --store {self.store}"

    @property
    def compress(self) -> Compress | None:
        """Return the setting if it evicts entries."""
        return self.setting if isinstance(self.setting, Compress) else None

    @property
    def sparse(self) -> Sparse | None:
        """Return the setting if it is sparse attention."""
        return self.setting if isinstance(self.setting, Sparse) else None

    @property
    def evicts_in_blocks(self) -> bool:
        """Return whether entries are evicted while a prompt is read."""
        return self.compress is not None and self.compress.evicts_in_blocks

    def require(self, model) -> None:
        """Raise SnapKVError if options exclude each other, or the model does not support them."""
        require_compatible(self, When.CHOSEN)
        if self.sparse is not None:
            _require_sparse_support(model)
        self._require_heads(model)

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
