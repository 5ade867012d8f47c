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

# Default limits in bytes. They are raised if a single prompt needs more.
IN_MEMORY, IN_FILES = 4 * 10**9, 20 * 10**9
MIN_PREFIX_BYTES = 256 << 20  # the default size is never smaller than this
DEFAULT_CONTEXT = 1 << 17  # prompt length in tokens to assume if no limit is known


@dataclass(frozen=True)
class PrefixCacheSize:
    """The size of a prefix cache.

    Attributes:
        limit: total size in bytes.
        context: length of the longest prompt in tokens.
        prompt_bytes: number of bytes that the longest prompt takes in the cache. 0 if the setting does not support
            prompts of this length.
    """

    limit: int
    context: int
    prompt_bytes: int

    def __str__(self) -> str:
        """Return the server's startup message: how many prompts fit, or how to make room for one."""
        size = f"prefix cache: {format_bytes(self.limit)}"
        if self.prompt_bytes == 0:
            return size
        n_prompts = self.limit // self.prompt_bytes
        if n_prompts > 0:
            prompts = "prompt" if n_prompts == 1 else "prompts"
            return f"{size} hold {n_prompts:,} {prompts} of {self.context:,} tokens"
        n_fitting = self.context * self.limit // self.prompt_bytes
        prompt_size = format_bytes(self.prompt_bytes)
        return (
            f"{size} hold no prompt of {self.context:,} tokens, which takes {prompt_size}, but one of "
            f"{n_fitting:,}; --prefix-bytes gives more, and --sparse with --store 8bit needs less"
        )


def prefix_cache_size(
    model: Any,
    options: dict[str, Any],
    machine: Machine,
    *,
    user_limit: int | None = None,
    max_kv_bytes: int | None = None,
    max_context: int | None = None,
) -> PrefixCacheSize:
    """Return the size of the prefix cache.

    By default, the cache has room for at least one prompt of the maximum length, but takes at most half of the memory
    that the weights leave free. Requests need the other half. If entries are in files, the default is at most half of
    the free disk space instead.

    Args:
        model: the served model.
        options: keyword arguments of `CompressedBatchGenerator`.
        machine: the machine to serve on.
        user_limit: size in bytes set by the user. None for the default.
        max_kv_bytes: KV memory limit in bytes set by the user. A prefix cache in memory must not exceed it. None or 0
            for no limit.
        max_context: maximum prompt length in tokens set by the user. None for no limit.
    """
    config, _ = CompressionConfig.from_keywords(options)
    model_context = trained_length(model) or max_context or DEFAULT_CONTEXT
    context = min(model_context, max_context or model_context)
    try:
        prompt_bytes = Footprint(EntrySizes(model), config).prefix_bytes(context)
    except SnapKVError:  # the setting does not support prompts of this length
        prompt_bytes = 0
    limit = user_limit or _default_limit(model, config, machine, prompt_bytes)
    if max_kv_bytes and not in_files(config.store):
        limit = min(limit, max_kv_bytes)
    return PrefixCacheSize(limit=limit, context=context, prompt_bytes=prompt_bytes)


def _default_limit(
    model: Any, config: CompressionConfig, machine: Machine, prompt_bytes: int
) -> int:
    """Return the default size in bytes, given the size of the longest prompt."""
    if config.sparse is not None and in_files(config.store):
        usual_limit = IN_FILES
        free_bytes = shutil.disk_usage(config.sparse.store_dir or tempfile.gettempdir()).free
    else:
        usual_limit = IN_MEMORY
        free_bytes = machine.usable - weight_bytes(model)
    max_limit = max(MIN_PREFIX_BYTES, free_bytes // 2)
    return min(max(usual_limit, prompt_bytes), max_limit)
