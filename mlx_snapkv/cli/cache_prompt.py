"""`mlx-snapkv cache-prompt`: a long text, read once and saved."""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ..engine.report import NO_POLICY, CompressionReport, format_bytes
from ..errors import SnapKVError
from . import cache_options, options
from .prompts import opening_tokens
from .reading import Reading


def cache_prompt(
    *,
    model: options.ModelOptions,
    output: Annotated[str, Option("--output", "-o", help="The .safetensors file to write.")],
    prompt: options.TextOptions,
    cache: cache_options.CacheOptions,
    policy: cache_options.PolicyOptions,
    retention: cache_options.MemoryOptions,
    far: cache_options.Far = None,
    quiet: options.Quiet = False,
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
    from ..engine.prefill import require_book
    from ..engine.retention import RetentionConfig
    from ..saved import require_writable

    chosen, memory = policy.resolve(), retention.memory
    require_book(chosen, memory)
    if memory != "drop" and cache.kv_bits is not None:
        raise SnapKVError(
            "--kv-bits quantises what answers are decoded from: for all entries, give --memory recall:file:8bit or "
            "recall:file:4bit"
        )
    path = require_writable(output)
    text = prompt.read()
    loaded, tokenizer = model.load()
    cache.require(loaded)
    RetentionConfig(memory, far=far).require(loaded, chosen)
    now, reading = datetime.now(), Reading(quiet)
    opening = partial(opening_tokens, tokenizer, text, prompt.system_prompt, now)
    tokens = reading.wait_for(opening)
    keywords = {"policy": chosen, "memory": memory, "far": far, **cache.keywords()}
    reading.warn(loaded, len(tokens), **keywords)
    notes = {"text": text, "system_prompt": prompt.system_prompt, "time": now.isoformat()}
    _save(path, loaded, tokens, keywords, notes, reading)


def _save(
    path: Path,
    model: Any,
    tokens: list[int],
    keywords: dict[str, Any],
    notes: dict[str, Any],
    reading: Reading,
) -> None:
    """Read the text, write its caches, and say what they are."""
    from .. import saved
    from ..caches.memories import saved_forms
    from ..engine.footprint import book_cost
    from .progress import writing_bar

    policy, memory, replaced = keywords["policy"], keywords["memory"], path.exists()
    folder = path.resolve().parent
    with reading.bar(partial(book_cost, model, policy, memory, saved_in=folder)) as bar:
        cache, report = _read(model, tokens, **keywords, prompt_progress_callback=bar)
    used = report.policy if report.compressed else NO_POLICY
    if memory != "drop":
        notes["memory"], used = memory, str(policy)
    writing, forms = writing_bar(reading.console), saved_forms(model, cache)
    with writing as update:
        saved.save(path, model, forms, tokens, used, notes, update)
    where = f"saved in {path}{', in place of the one that was there' if replaced else ''}"
    if writing.done:
        where += f", and all entries in a folder beside it ({format_bytes(writing.done)})"
    if not reading.console.quiet:
        print(f"{_summary(report, forms, memory)} | {where}", file=sys.stderr)


def _read(
    model: Any,
    tokens: list[int],
    *,
    policy: Any,
    memory: str,
    far: str | None,
    kv_bits: int | None,
    kv_group_size: int,
    **keywords: Any,
) -> tuple[list, CompressionReport]:
    """The text's caches, as the policy and the memory want them, and what was done."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from ..engine.prefill import prefill, read, read_book

    quantised: dict[str, Any] = {"kv_bits": kv_bits, "kv_group_size": kv_group_size}
    if policy is None:
        cache = make_prompt_cache(model)
        read(model, mx.array(tokens), cache, keywords | quantised)
        return cache, CompressionReport(NO_POLICY, len(tokens), "no policy was given")
    if memory != "drop":
        return read_book(model, tokens, policy, memory, far=far, **keywords)
    return prefill(model, tokens, policy, far=far, **keywords, **quantised)


def _summary(report: CompressionReport, cache: list, memory: str) -> str:
    """What the answers will start from."""
    from ..caches.layers import kv_bytes

    kept = report.entries_text if memory == "drop" else f"{report.entries} entries resident"
    kept += report.recall_text
    if not report.compressed:
        kept = f"full cache: {report.reason}"
    held = report.kv_bytes_after or kv_bytes(cache)
    return f"{report.prompt_tokens} prompt tokens, {kept}, KV memory {format_bytes(held)}"
