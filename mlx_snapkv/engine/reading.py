"""Reading a text for questions that come later, within a fixed budget, with every entry stored."""

import mlx.core as mx

from ..caches.layers import attention_layers, kv_bytes
from ..caches.memories import make_caches
from ..errors import SnapKVError
from ..policies import Policy, Stages
from .decision import PREFILL_STEP_SIZE, ProgressCallback, gate
from .making import make_request
from .prefill import read
from .recalling import Recall
from .report import CompressionReport


def require_book(policy: Policy | Stages | None, memory: str) -> None:
    """Raises: SnapKVError: a text that is read so by itself keeps nothing that later questions could recall."""
    Recall(memory).require(policy)
    if memory == "drop":
        return
    if policy is None or not policy.reads_in_blocks:
        asked = "no policy was given" if policy is None else f"{policy} reads the text in full"
        raise SnapKVError(
            f"memory={memory} saves a text that is read in blocks, and {asked}: give a policy such as "
            "keydiff:budget=4096 then snapkv:top_k=1024, or drop the memory"
        )


def read_book(
    model,
    tokens: list[int],
    policy: Policy | Stages,
    memory: str,
    *,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: ProgressCallback | None = None,
    far: str | None = None,
) -> tuple[list, CompressionReport]:
    """Read a text that nothing is asked about yet; a turn of a conversation can go on from its caches.

    Args:
        memory: where the entries are stored.
        prefill_step_size, prompt_progress_callback, far: as of `prefill`.

    Returns:
        The caches, and a report of what is resident, whose `reason` is set if everything is.

    Raises:
        SnapKVError: policy and memory don't make a book, the model is not supported, or there is no room for the
            entries.
    """
    require_book(policy, memory)
    caches = make_caches(model, memory, policy)
    options = {
        "prefill_step_size": prefill_step_size,
        "prompt_progress_callback": prompt_progress_callback,
    }
    report = CompressionReport(str(policy), len(tokens), gate(policy, len(tokens), None))
    if report.reason is not None:
        read(model, mx.array(tokens), caches, options)
        return caches, report
    request = make_request(
        model, policy, len(tokens), caches, None, Recall(memory, refresh="turn", far=far)
    )
    options["prefill_step_size"] = request.step_size(prefill_step_size)
    with request.recording():
        read(model, mx.array(tokens), request.caches, options)
    report.entries_kept, report.pulled_to = [None] * len(caches), request.pulled_to
    for layer in attention_layers(model, caches):
        cache = layer.cache_in(caches)
        cache.offload()
        report.entries_kept[layer.index] = cache.n_entries
        report.kv_bytes_before += cache.full_nbytes
        report.kv_bytes_after -= cache.store.nbytes
    report.kv_bytes_after += kv_bytes(caches)
    return caches, report
