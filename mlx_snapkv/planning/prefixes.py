"""The size of a server's prefix cache, in bytes and in prompts."""

import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

from ..errors import SnapKVError
from ..models.trained_length import trained_length
from ..sparse.prompt_caches import in_files
from .config import CompressionConfig
from .entry_sizes import EntrySizes, weight_bytes
from .footprint import Footprint
from .machine import Machine
from .units import format_bytes

IN_MEMORY, IN_FILES = 4 * 10**9, 20 * 10**9  # default bytes; more if one prompt needs more
MIN_PREFIX_BYTES = 256 << 20  # minimum bytes, however little memory there is
DEFAULT_CONTEXT = 1 << 17  # tokens of a prompt if the trained length is unknown


@dataclass(frozen=True)
class PrefixRoom:
    """The size of a prefix cache.

    Attributes:
        limit: total bytes.
        context: number of tokens in the longest prompt.
        each: bytes of the longest prompt; 0 if the setting does not support it.
    """

    limit: int
    context: int
    each: int

    def __str__(self) -> str:
        """Return the line printed by the server: how many prompts fit, or how to make room for more."""
        room = f"prefix cache: {format_bytes(self.limit)}"
        if not self.each:
            return room
        n_prompts = self.limit // self.each
        if n_prompts:
            prompts = "prompt" if n_prompts == 1 else "prompts"
            return f"{room} hold {n_prompts:,} {prompts} of {self.context:,} tokens"
        max_tokens = self.context * self.limit // self.each
        return (
            f"{room} hold no prompt of {self.context:,} tokens, which takes {format_bytes(self.each)}, but one of "
            f"{max_tokens:,}; --prefix-bytes gives more, and --sparse with --store 4bit needs less"
        )


def prefix_room(
    model: Any,
    options: dict[str, Any],
    machine: Machine,
    *,
    given: int | None = None,
    max_kv_bytes: int | None = None,
    max_context: int | None = None,
) -> PrefixRoom:
    """Return a size of `given` bytes; by default, the size for a prompt as long as the model's context.

    The default is at most half of the memory that the weights leave, or of the disk, because requests need the other
    half.

    Args:
        model: the served model.
        options: keywords of the `CompressedBatchGenerator`.
        machine: the machine, with its free memory.
        given: bytes set by the user; None for the default.
        max_kv_bytes: limit of KV memory set by the user; None or 0 without one.
        max_context: maximum tokens of a prompt, set by the user; None for no limit.
    """
    config, _ = CompressionConfig.from_keywords(options)
    longest = trained_length(model) or max_context or DEFAULT_CONTEXT
    context = min(longest, max_context or longest)
    try:
        each = Footprint(EntrySizes(model), config).of_prefix(context)
    except SnapKVError:  # the setting does not support prompts of this length
        each = 0
    if config.sparse is not None and in_files(config.store):
        default = IN_FILES
        free = shutil.disk_usage(config.sparse.store_dir or tempfile.gettempdir()).free
    else:
        default = IN_MEMORY
        free = machine.usable - weight_bytes(model)
    if given:
        limit = given
    else:
        half = max(MIN_PREFIX_BYTES, free // 2)
        limit = min(max(default, each), half)
    if max_kv_bytes and not in_files(config.store):
        limit = min(limit, max_kv_bytes)
    return PrefixRoom(limit=limit, context=context, each=each)
