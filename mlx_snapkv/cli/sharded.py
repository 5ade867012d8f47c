"""A model that several Macs hold together, loaded by each of them."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import SnapKVError, brief
from ..several.ranks import Ranks, here
from .spelling import flag_of

INDEX = "model.safetensors.index.json"
# What mlx and mlx-lm say of a model that can't be split so.
REASONS = ("does not support", "must be positive", "annot shard", "annot be sharded")
ALONE_ONLY = "start it without mlx.launch"


def require_shared(ranks: Ranks, pipeline: bool | None, **options: Any) -> None:
    """Check that a command was started alike by all ranks, and with what a shared model goes together with.

    Args:
        pipeline: None is a command that one Mac has to run by itself.
        **options: those that don't go together with one, if they are given.

    Raises:
        SnapKVError: that is not so.
    """
    if ranks.size == 1:
        if pipeline:
            raise SnapKVError(
                "--pipeline splits a model over several Macs: start the command by mlx.launch, or drop it"
            )
        return
    ranks.require_same(options=" ".join(sys.argv[1:]))
    if pipeline is None:
        raise SnapKVError(
            f"mlx-snapkv {sys.argv[1]} does not run on several Macs yet: {ALONE_ONLY}"
        )
    require_alone(**options)


def require_alone(**options: Any) -> None:
    """Raises: SnapKVError: an option is given that several Macs can't serve, and this is one of several."""
    for name, given in options.items():
        if given and here().size > 1:
            raise SnapKVError(
                f"{flag_of(name)} does not go together with several Macs: drop it, or {ALONE_ONLY}"
            )


def load_shared(
    folder: str, ranks: Ranks, pipeline: bool, trust_remote_code: bool
) -> tuple[Any, Any]:
    """This rank's part of a model, by mlx-lm's `sharded_load`, and the tokenizer.

    Raises:
        SnapKVError: mlx-lm can't split it so.
    """
    import mlx.core as mx
    from mlx_lm.utils import sharded_load

    group = mx.distributed.init()
    groups: dict[str, Any] = {"pipeline_group" if pipeline else "tensor_group": group}
    try:
        model, tokenizer = sharded_load(
            folder,
            **groups,
            tokenizer_config={"trust_remote_code": trust_remote_code},
            trust_remote_code=trust_remote_code,
        )
    except FileNotFoundError as error:
        if not str(error.filename).endswith(INDEX):
            raise
        raise SnapKVError(
            f"--pipeline needs {INDEX}, which tells the layers' files: make it with mlx_lm.convert, or drop it"
        ) from error
    except ValueError as error:
        if not any(reason in str(error) for reason in REASONS):
            raise
        other = "drop --pipeline" if pipeline else "add --pipeline"
        raise SnapKVError(
            f"mlx-lm can't split this model so ({brief(error)}): {other}, or start fewer processes"
        ) from error
    _require_whole_heads(model, ranks, pipeline)
    return model, tokenizer


def _require_whole_heads(model: Any, ranks: Ranks, pipeline: bool) -> None:
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    n = getattr(args, "num_key_value_heads", None) or text.get("num_key_value_heads")
    if not pipeline and n and n % ranks.size:
        raise SnapKVError(
            f"{n} KV heads can't be split over {ranks.size} processes: start as many as divide them, or add --pipeline"
        )
