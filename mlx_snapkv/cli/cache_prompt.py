"""`mlx-snapkv cache-prompt`: read a long text once and save its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..engine.report import NO_POLICY, CompressionReport
from ..planning.units import format_bytes
from . import cache_options, options
from .prompt_console import PromptConsole
from .prompts import TextOptions, opening_tokens

if TYPE_CHECKING:
    from ..planning.settings import Setting


def cache_prompt(
    *,
    model_options: options.ModelOptions,
    output: Annotated[str, Option("--output", "-o", help="The .safetensors file to write.")],
    prompt: TextOptions,
    cache: cache_options.CacheOptions,
    policy: cache_options.PolicyOptions,
    store: cache_options.StoreOptions,
    quiet: options.Quiet = False,
) -> None:
    r"""Read a long text once and save its KV cache: all entries, or what a policy keeps.

    generate --prompt-cache-file then starts each answer from the saved cache. With --sparse, all entries are saved, and
    answers choose which ones to read. With --store file, reading a text of any length takes little memory, and its
    entries are saved in a folder next to the file.

    \b
      mlx-snapkv cache-prompt --model demo --prompt-file book.txt -o book.safetensors
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?" --sparse top_k=2048
      mlx-snapkv cache-prompt --model MODEL --prompt-file shelf.txt -o shelf.safetensors \
          --sparse top_k=1024 --store file
    """
    from .. import saved
    from ..caches.layers import kv_bytes
    from ..planning.config import CompressionConfig
    from ..planning.file_cost import file_cost
    from ..sparse.prompt_caches import caches_to_save

    setting = store.apply_to(policy.resolve())
    config = CompressionConfig(setting, is_text=True).with_mlx_options(vars(cache))
    path = saved.require_writable(output)
    text = prompt.read()
    model, tokenizer = model_options.load()
    cache.require_supported(model)
    config.require_supported(model)
    now = datetime.now()
    console = PromptConsole(quiet)
    console.say_all(cache.bits_notes())
    tokens = console.wait_for(partial(opening_tokens, tokenizer, text, prompt.system_prompt, now))
    console.announce(
        model,
        len(tokens),
        shows_kept=setting is not None,
        max_kv_bytes=model_options.max_kv_bytes,
        is_text=True,
        policy=setting,
        **vars(cache),
    )
    predict_cost = partial(file_cost, model, setting, saved_in=path.resolve().parent)
    with console.bar(predict_cost) as update_bar:
        caches, report = _prefill_text(
            model,
            tokens,
            setting,
            **vars(cache),
            prompt_progress_callback=update_bar,
        )
    caches = caches_to_save(caches)
    notes = {
        "text": text,
        "system_prompt": prompt.system_prompt,
        "time": now.isoformat(),
    }
    is_sparse = config.sparse is not None
    # Record sparse attention even if the text was too short for it, because answers that continue from the file will
    # use it.
    saved_policy = report.policy if report.compressed or is_sparse else NO_POLICY
    save = partial(saved.save, path, model, caches, tokens, saved_policy, notes)
    files_text = _save_with_bar(path, save, console)
    memory_text = f"KV memory {format_bytes(report.kv_bytes_after or kv_bytes(caches))}"
    kept_text = _kept_text(report, is_sparse)
    console.say(f"{report.prompt_tokens} prompt tokens, {kept_text}, {memory_text} | {files_text}")


def _save_with_bar(path: Path, save: Callable[[Any], None], console: PromptConsole) -> str:
    """Call `save` with a progress bar's callback. Return a description of the written files."""
    from .progress import writing_bar

    replacement_text = ", replacing the earlier file" if path.exists() else ""
    bar = writing_bar(console.rich_console)
    with bar as update_bar:
        save(update_bar)
    folder_text = ""
    n_folder_bytes = bar.n_done  # 0 if all entries are in the file itself
    if n_folder_bytes:
        folder_text = f", and all entries in a folder beside it ({format_bytes(n_folder_bytes)})"
    return f"saved in {path}{replacement_text}{folder_text}"


def _kept_text(report: CompressionReport, is_sparse: bool) -> str:
    """Describe the saved entries for the closing line."""
    if not report.compressed:
        return f"full cache: {report.reason}"
    if not is_sparse:
        return report.entries_text
    text = f"all {report.entries:,} entries"
    if report.read_per_chunk is not None:
        text += f", {report.read_per_chunk:,} read by a chunk"
    return text


def _prefill_text(
    model: Any,
    tokens: list[int],
    setting: Setting | None,
    **prefill_options: Any,
) -> tuple[list, CompressionReport]:
    """Prefill the text and return its caches and a report.

    Args:
        model: an mlx-lm model.
        tokens: token ids of the text.
        setting: policy or sparse attention. None for the full cache.
        **prefill_options: mlx-lm's prefill options.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from ..engine.prefill import prefill, read

    if setting is None:
        caches = make_prompt_cache(model)
        prefill_options["quantized_kv_start"] = 0  # --kv-bits makes the file of any text smaller
        read(model, mx.array(tokens), caches, prefill_options)
        return caches, CompressionReport(NO_POLICY, len(tokens), "no policy was given")
    return prefill(model, tokens, setting, **prefill_options)
