"""The room that a server has for the prompts that it has read, in bytes and in prompts."""

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

IN_MEMORY, IN_FILES = 4 * 10**9, 20 * 10**9  # bytes by default, more if one prompt takes more
MIN_PREFIX_BYTES = 256 << 20  # bytes, however little memory there is
DEFAULT_CONTEXT = 1 << 17  # tokens of a prompt for a model that does not tell its trained length


@dataclass(frozen=True)
class PrefixRoom:
    """The room for prompts that have been read.

    Attributes:
        limit: bytes in all.
        context: tokens of the longest prompt.
        each: bytes of the longest prompt; 0 if the setting can't serve it.
    """

    limit: int
    context: int
    each: int

    def __str__(self) -> str:
        """Return the line that the server prints: how many prompts the room holds, or how to get more."""
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
    """Return the room of `given` bytes; by default, of a prompt as long as the model's context.

    The default is at most half of the memory that the weights leave, or of the disk. Requests need the other half.

    Args:
        model: the model that is served.
        options: the options of the `CompressedBatchGenerator`.
        machine: the machine, with its free memory.
        given: bytes that the user has set; None for the default.
        max_kv_bytes: the limit of KV memory that the user has set; None or 0 without one.
        max_context: the server's limit of a prompt's tokens; None for no limit.
    """
    config, _ = CompressionConfig.from_keywords(options)
    longest = trained_length(model) or max_context or DEFAULT_CONTEXT
    context = min(longest, max_context or longest)
    try:
        each = Footprint(EntrySizes(model), config).of_prefix(context)
    except SnapKVError:  # the setting can't serve a prompt of this length
        each = 0
    if in_files(config.store):
        default = IN_FILES
        free = shutil.disk_usage(config.store_dir or tempfile.gettempdir()).free
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
