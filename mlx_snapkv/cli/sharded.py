"""Commands on several Macs: each loads its shard of the model; rank 0 reads input and prints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import SnapKVError, brief
from ..several.ranks import Ranks, here
from .command import flag_of
from .process import be_silent

T = TypeVar("T")

INDEX = "model.safetensors.index.json"
# What mlx and mlx-lm say of a model that can't be split so.
REASONS = ("does not support", "must be positive", "annot shard", "annot be sharded")
ALONE_ONLY = "start it without mlx.launch"


def join(pipeline: bool | None, **options: Any) -> Ranks:
    """All processes that were started with this one. Those but rank 0 print nothing from here on.

    Args:
        pipeline: the Macs split the model by layers; None is a command for one Mac.
        **options: those that several Macs can't serve.

    Raises:
        SnapKVError: the command is for one Mac, an option is, or the ranks were given different options.
    """
    ranks = here()
    if ranks.rank:
        be_silent()
    if ranks.size == 1 and pipeline:
        raise SnapKVError(
            "--pipeline is for several Macs: start the command by mlx.launch, or drop it"
        )
    ranks.require_same(options=" ".join(sys.argv[1:]))
    if ranks.size > 1 and pipeline is None:
        raise SnapKVError(f"mlx-snapkv {sys.argv[1]} does not run on several Macs: {ALONE_ONLY}")
    require_alone(**options)
    return ranks


def require_alone(**options: Any) -> None:
    """Raises: SnapKVError: an option is given that several Macs can't serve, and this is one of several."""
    for name, given in options.items():
        if given and here().size > 1:
            raise SnapKVError(
                f"{flag_of(name)} can't be used on several Macs: drop it, or {ALONE_ONLY}"
            )


def on_first(work: Callable[[], T]) -> T:
    """The result of `work`, which only rank 0 does; what it raises there is raised on all ranks."""
    return here().from_first(work)


def load_shared(folder: str, ranks: Ranks, pipeline: bool, **options: Any) -> tuple[Any, Any]:
    """This rank's shard of a model, and the tokenizer; SnapKVError if mlx-lm can't split it so."""
    import mlx.core as mx
    from mlx_lm.utils import sharded_load

    group: Any = {"pipeline_group" if pipeline else "tensor_group": mx.distributed.init()}
    try:
        model, tokenizer = sharded_load(folder, **group, **options)
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
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    n = getattr(args, "num_key_value_heads", None) or text.get("num_key_value_heads")
    if not pipeline and n and n % ranks.size:
        raise SnapKVError(
            f"{n} KV heads can't be split over {ranks.size} processes: start as many as divide them, or add --pipeline"
        )
    return model, tokenizer
