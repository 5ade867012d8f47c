"""The class of all commands: an option that would do nothing is a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand

from ..errors import SnapKVError
from .spelling import flag_of

Given = dict[str, Any]


def _keeps_files(given: Given) -> bool:
    from ..caches.memories import in_files

    return in_files(given["memory"]) or given.get("prompt_cache_file") is not None


# By option, what it needs: how that is said, and whether it is there.
NEEDS: dict[str, tuple[str, Callable[[Given], bool]]] = {
    "kv_group_size": ("--kv-bits", lambda given: given["kv_bits"] is not None),
    "quantized_kv_start": ("--kv-bits", lambda given: given["kv_bits"] is not None),
    "num_draft_tokens": ("--draft-model", lambda given: given["draft_model"] is not None),
    "verify_below": ("--verify unsure", lambda given: given["verify"] == "unsure"),
    "store_dir": ("--memory recall:file", _keeps_files),
    "prefix_dir_bytes": ("--prefix-dir", lambda given: given["prefix_dir"] is not None),
}
LATER = ("verify_below", "store_dir")  # which a chat may need when it is under way


class Command(TyperCommand):
    """Raises: SnapKVError: an option does nothing without another one."""

    def invoke(self, ctx: Any) -> Any:
        for name, (other, is_met) in NEEDS.items():
            if name not in ctx.params or (name in LATER and self.name == "chat"):
                continue
            source = ctx.get_parameter_source(name)
            if source.name == "COMMANDLINE" and not is_met(ctx.params):
                flag = flag_of(name)
                raise SnapKVError(f"{flag} does nothing without {other}: give that, or drop {flag}")
        return super().invoke(ctx)
