"""What a family file tells: where its attention class lives."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionFamily:
    """One attention class of mlx-lm.

    name: what users know it by; module, class_name: where mlx-lm keeps the class; attribute: the decoder
    layer's name for the attention module.
    """

    name: str
    module: str
    class_name: str
    attribute: str = "self_attn"

    def attention_class(self) -> type:
        return getattr(importlib.import_module(self.module), self.class_name)

    def attention_of(self, layer) -> Any | None:
        """The layer's attention module if it is of this family, else None."""
        attention = getattr(layer, self.attribute, None)
        return attention if isinstance(attention, self.attention_class()) else None
