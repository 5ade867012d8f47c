"""`mlx-snapkv cache-prompt`: a long text, read once and saved."""

import sys
from contextlib import closing
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import typer

from ..engine.report import NO_POLICY, CompressionReport, format_bytes
from ..errors import SnapKVError
from . import flags
from .fitting import tell_if_too_long
from .generation import require_kv_bits
from .loading import load_model
from .opening import opening_tokens
from .prompt_text import read_prompt
from .waiting import TOKENISING, waited_for


def cache_prompt(
    model: flags.Model,
    output: Annotated[str, typer.Option("--output", "-o", help="The .safetensors file to write.")],
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    system_prompt: flags.SystemPrompt = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    adapter_path: flags.AdapterPath = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    far: flags.Far = None,
    kv_bits: flags.KVBits = None,
    kv_group_size: flags.KVGroupSize = 64,
    quiet: flags.Quiet = False,
) -> None:
    """Read a long text once and save its KV cache, compressed if a policy is given.

    Each answer of generate --prompt-cache-file then starts from there. With a memory that recalls, a text of any length
    is read within the policy's budget, and every entry is saved, in a folder beside the file.

    \b
      mlx-snapkv cache-prompt --model demo --prompt-file book.txt --policy keydiff:budget=25% -o book.safetensors
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?"
      mlx-snapkv cache-prompt --model MODEL --prompt-file shelf.txt -o shelf.safetensors --memory recall:file \\
          --policy "keydiff:budget=4096 then snapkv:top_k=1024"
    """
    from .. import saved
    from ..caches.memories import saved_forms
    from ..engine.book_cost import book_cost
    from ..engine.far import require_far
    from ..engine.reading import require_book
    from ..engine.recalling import Recall
    from ..policies import resolve_policy
    from .before_book import telling
    from .progress import PrefillBar, WritingBar, stderr_console

    chosen = resolve_policy(snapkv, policy)
    require_book(chosen, memory)
    if memory != "drop" and kv_bits is not None:
        raise SnapKVError(
            "--kv-bits quantises what answers are decoded from: for all entries, give --memory recall:file:8bit or "
            "recall:file:4bit"
        )
    path = saved.require_writable(output)
    replaced = path.exists()
    text = read_prompt(prompt, prompt_file)
    loaded, tokenizer = load_model(model, adapter_path, trust_remote_code)
    require_kv_bits(loaded, kv_bits, kv_group_size)
    recall = Recall(memory, far=far)
    require_far(loaded, chosen, recall)
    now = datetime.now()
    console = stderr_console(quiet)
    opening = partial(opening_tokens, tokenizer, text, system_prompt, now)
    tokens = waited_for(console, TOKENISING, opening)
    options: dict[str, Any] = {"prefill_step_size": prefill_step_size}
    quantised = {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
    folder = path.resolve().parent
    cost = partial(book_cost, loaded, chosen, memory, asks=False, saved_in=folder)
    ways: dict[str, Any] = {"policy": chosen, "memory": memory, "far": far, **options, **quantised}
    tell_if_too_long(console, loaded, len(tokens), **ways)
    with closing(PrefillBar(console)) as bar:
        options["prompt_progress_callback"] = telling(console, cost, bar.update)
        cache, report = _read(loaded, tokens, chosen, recall, options, quantised)
    notes = {"text": text, "system_prompt": system_prompt, "time": now.isoformat()}
    used = report.policy if report.compressed else NO_POLICY
    if memory != "drop":
        notes["memory"], used = memory, str(chosen)
    with closing(WritingBar(console)) as writing:
        forms = saved_forms(loaded, cache)
        saved.save(path, loaded, forms, tokens, used, notes, writing.update)
    if not quiet:
        where = f"saved in {path}{', in place of the one that was there' if replaced else ''}"
        if writing.n_bytes:
            where += f", and all entries in a folder beside it ({format_bytes(writing.n_bytes)})"
        print(f"{_told(report, forms, memory)} | {where}", file=sys.stderr)


def _read(
    model, tokens: list[int], policy: Any, recall: Any, options: dict, quantised: dict
) -> tuple[list, CompressionReport]:
    """The text's caches, as the policy and the memory want them, and what was done."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from ..engine.prefill import prefill, read
    from ..engine.reading import read_book

    if policy is None:
        cache = make_prompt_cache(model)
        read(model, mx.array(tokens), cache, options | quantised)
        return cache, CompressionReport(NO_POLICY, len(tokens), "no policy was given")
    if recall.memory != "drop":
        return read_book(model, tokens, policy, recall.memory, far=recall.far, **options)
    return prefill(model, tokens, policy, far=recall.far, **options, **quantised)


def _told(report: CompressionReport, cache: list, memory: str) -> str:
    """What the answers will start from."""
    from ..caches.layers import kv_bytes

    kept = report.entries_text if memory == "drop" else f"{report.entries} entries resident"
    kept += report.recall_text
    if not report.compressed:
        kept = f"full cache: {report.reason}"
    held = report.kv_bytes_after or kv_bytes(cache)
    return f"{report.prompt_tokens} prompt tokens, {kept}, KV memory {format_bytes(held)}"
