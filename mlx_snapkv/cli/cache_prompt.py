"""`mlx-snapkv cache-prompt`: a long text, read once and saved."""

from datetime import datetime
from functools import partial
from typing import Annotated, Any

from typer import Option

from ..engine.report import NO_POLICY, CompressionReport
from ..planning.options import RequestOptions, noted
from ..planning.units import format_bytes
from . import cache_options, options
from .prompts import TextOptions, opening_tokens
from .reading import Reading


def cache_prompt(
    *,
    model: options.ModelOptions,
    output: Annotated[str, Option("--output", "-o", help="The .safetensors file to write.")],
    prompt: TextOptions,
    cache: cache_options.CacheOptions,
    policy: cache_options.PolicyOptions,
    request: RequestOptions,
    quiet: options.Quiet = False,
) -> None:
    """Read a long text once and save its KV cache: all entries, or what a policy keeps.

    generate --prompt-cache-file then starts each answer from the saved cache. With --sparse all entries are saved, for
    answers to choose from; with --store file a text of any length is read in little memory, and its entries
    are saved in a folder beside the file.

    \b
      mlx-snapkv cache-prompt --model demo --prompt-file book.txt -o book.safetensors
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?" --sparse top_k=2048
      mlx-snapkv cache-prompt --model MODEL --prompt-file shelf.txt -o shelf.safetensors \\
          --sparse top_k=1024 --store file
    """
    from .. import saved
    from ..caches.layers import kv_bytes
    from ..planning.config import CompressionConfig
    from ..planning.exclusions import When, require_compatible
    from ..planning.file_cost import file_cost
    from ..sparse.prompt_caches import saved_forms
    from .progress import writing_bar

    chosen = policy.resolve()
    config = CompressionConfig(chosen, **request.keywords, is_text=True).beside(vars(cache))
    require_compatible(config, When.CHOSEN)
    store = config.store
    path, text = saved.require_writable(output), prompt.read()
    loaded, tokenizer = model.load()
    cache.require(loaded)
    config.require(loaded)
    now, reading = datetime.now(), Reading(quiet)
    opening = partial(opening_tokens, tokenizer, text, prompt.system_prompt, now)
    tokens = reading.wait_for(opening)
    keywords = {"policy": chosen, **config.keywords, **vars(cache)}
    reading.warn(loaded, len(tokens), was_chosen=chosen is None, is_text=True, **keywords)
    cost = partial(
        file_cost, loaded, store, folder=config.store_dir, saved_in=path.resolve().parent
    )
    with reading.bar(cost) as bar:
        read, report = _read(
            loaded, tokens, chosen, config.keywords, **vars(cache), prompt_progress_callback=bar
        )
    notes: dict[str, Any] = {"text": text, "system_prompt": prompt.system_prompt}
    notes |= {"time": now.isoformat(), "options": noted(config.keywords)}
    used = report.policy if report.compressed else NO_POLICY
    if store is not None:
        used = str(chosen)
    where = f"saved in {path}{', replacing the earlier file' if path.exists() else ''}"
    writing, forms = writing_bar(reading.console), saved_forms(loaded, read)
    with writing as update:
        saved.save(path, loaded, forms, tokens, used, notes, update)
    if writing.done:
        where += f", and all entries in a folder beside it ({format_bytes(writing.done)})"
    held = format_bytes(report.kv_bytes_after or kv_bytes(forms))
    kept = _kept_text(report, store)
    reading.say(f"{report.prompt_tokens} prompt tokens, {kept}, KV memory {held} | {where}")


def _kept_text(report: CompressionReport, store: str | None) -> str:
    """What of the text's entries is saved."""
    if not report.compressed:
        return f"full cache: {report.reason}"
    if store is None:
        return report.entries_text
    per_chunk = report.read_per_chunk
    chunks = "" if per_chunk is None else f", {per_chunk:,} read by a chunk"
    return f"all {report.entries:,} entries{chunks}"


def _read(
    model: Any, tokens: list[int], policy: Any, options: dict[str, Any], **loop_options: Any
) -> tuple[list, CompressionReport]:
    """The text's caches, as the policy and the store want them, and what was done."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from ..engine.prefill import prefill, read

    if policy is None:
        cache = make_prompt_cache(model)
        read(model, mx.array(tokens), cache, loop_options)
        return cache, CompressionReport(NO_POLICY, len(tokens), "no policy was given")
    return prefill(model, tokens, policy, **options, **loop_options)
