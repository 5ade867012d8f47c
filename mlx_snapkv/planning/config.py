"""How a request is compressed: its policy, and what happens to the entries that its answer is not decoded from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..caches.stored_caches import require_store
from ..entries.quantization import Quantization, taken_from
from ..errors import (
    SnapKVError,
    UnsupportedModelError,
)
from ..models import attentions, type_of
from ..models.distributed import TENSOR, split_of
from ..paths import path_of
from ..policies import Method, Stages, resolve_method
from .exclusions import When, require_compatible
from .options import OPTIONS, RequestOptions, noted
from .prompt_plan import require_step_size

METHODS = ("snapkv", "policy", "sparse")


@dataclass(frozen=True)
class CompressionConfig(RequestOptions):
    """How a request is compressed, or where sparse attention keeps all entries; see `generate_step`.

    Attributes:
        store: where sparse attention keeps all entries, by default "memory"; None with a policy, which evicts.
        quantization: of the entries kept.
        turns: caches that hold tokens already are compressed again, as those of a conversation are.
        max_kv_size, has_draft_model: of mlx-lm's own, what compression can't be combined with.
        is_text: a text is read on its own, for questions to come.

    Raises: SnapKVError: an option is invalid or conflicts with another.
    """

    policy: Method | Stages | None = None
    quantization: Quantization | None = None
    turns: bool = False
    max_kv_size: int | None = None
    has_draft_model: bool = False
    is_text: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store is None and self.is_sparse:
            object.__setattr__(self, "store", "memory")
        if self.store_dir is not None:
            object.__setattr__(self, "store_dir", str(path_of(self.store_dir, "--store-dir")))
        require_store(self.store, self.store_dir)
        require_compatible(self, When.GIVEN)

    @classmethod
    def taken_from(
        cls, keywords: dict[str, Any], **more: Any
    ) -> tuple[CompressionConfig, dict[str, Any]]:
        """What the keywords of `generate_step` and its kin ask for, and those of mlx-lm among them, which count, too.

        Raises: SnapKVError: one is invalid or conflicts with another.
        """
        method = resolve_method(*map(keywords.get, METHODS))
        own = {name: keywords[name] for name in OPTIONS if name in keywords}
        taken = {*METHODS, *OPTIONS}
        others = {name: value for name, value in keywords.items() if name not in taken}
        return cls(method, **own, **more).beside(others), others

    def beside(self, options: dict[str, Any]) -> CompressionConfig:
        """The same beside mlx-lm's own options, those of `generate_step` and its kin."""
        require_step_size(options.get("prefill_step_size"))
        quantization, _ = taken_from(options)
        return replace(
            self,
            quantization=quantization,
            max_kv_size=options.get("max_kv_size"),
            has_draft_model=options.get("draft_model") is not None,
        )

    @property
    def identity(self) -> dict[str, str]:
        """Return what entries depend on beside the model and the tokens: a server's prefixes are found by it."""
        what = {"policy": self.policy, "quantization": self.quantization, **noted(self.keywords)}
        return {name: str(value) for name, value in what.items()}

    @property
    def reads_in_blocks(self) -> bool:
        """Whether entries are evicted while a prompt is read."""
        return self.policy is not None and self.policy.reads_in_blocks

    @property
    def reads_little(self) -> bool:
        """Whether no chunk of a prompt sees all that came before it."""
        return self.policy is not None and self.policy.reads_little

    @property
    def is_sparse(self) -> bool:
        """Whether all entries stay, and little of them is read."""
        return self.policy is not None and not self.policy.evicts

    @property
    def evicts(self) -> bool:
        """Whether an answer is decoded from entries that a policy has kept."""
        return self.policy is not None and self.policy.evicts

    @property
    def accumulates_attention(self) -> bool:
        """Whether the queries of all tokens vote."""
        return self.policy is not None and any(
            stage.accumulates_attention for stage in self.policy.stages
        )

    def require(self, model) -> None:
        """Raises: SnapKVError: options exclude each other, or this can't be done on this model."""
        require_compatible(self, When.CHOSEN)
        if self.is_sparse and any(
            x.family.method != "__call__" for x in attentions(model) if x.family
        ):
            raise UnsupportedModelError(
                f"sparse attention is not possible on model type {type_of(model)!r}, whose attention reads its cache "
                "by itself: give a policy, such as snapkv"
            )
        self._require_heads(model)

    def _require_heads(self, model) -> None:
        """Raises: SnapKVError: a policy compares all heads of a layer, and several Macs share them."""
        stages = () if self.policy is None else self.policy.stages
        agreeing = [stage for stage in stages if stage.heads_agree]
        if agreeing and split_of(model) == TENSOR:
            raise SnapKVError(
                "{} keeps the same entries in all heads of a layer, which several Macs share here: "
                "give each Mac whole layers (--pipeline), or choose another policy",
                agreeing[0].name,
            )
