"""Determines the size of a server's prefix cache."""

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

# Default sizes in bytes. They are larger if a single prompt needs more.
IN_MEMORY, IN_FILES = 4 * 10**9, 20 * 10**9
MIN_PREFIX_BYTES = 256 << 20  # the default size is never smaller than this
DEFAULT_CONTEXT = 1 << 17  # prompt length in tokens to assume if the trained length is unknown


@dataclass(frozen=True)
class PrefixRoom:
    """The size of a prefix cache.

    Attributes:
        limit: total size in bytes.
        context: length of the longest prompt in tokens.
        each: size of the longest prompt in bytes. 0 if the setting does not support this length.
    """

    limit: int
    context: int
    each: int

    def __str__(self) -> str:
        """Return the server's startup message: how many prompts fit, or how to make room for one."""
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
    """Return the size of the prefix cache.

    By default, the cache has room for at least one prompt as long as the model's context, but it takes at most half of
    the memory that the weights leave free, or half of the free disk space. Requests need the other half.

    Args:
        model: the served model.
        options: keyword arguments of `CompressedBatchGenerator`.
        machine: the machine to serve on.
        given: size in bytes set by the user. None for the default.
        max_kv_bytes: KV memory limit in bytes set by the user. None or 0 for no limit.
        max_context: maximum prompt length in tokens set by the user. None for no limit.
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
