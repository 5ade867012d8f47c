"""`mlx-snapkv serve`: a local server for agents and apps."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import typer

from ..engine.report import VERIFY_BELOW
from ..errors import SnapKVError
from ..paths import path_of
from ..server import BILLING
from . import flags
from .answering import batch_options, load_for_requests, most_kv_bytes
from .interrupts import listen
from .options import n_bytes

KEY_VARIABLE = "MLX_SNAPKV_API_KEY"
PREFIXES = "4GB"
PREFIX_FILES = "20GB"


def serve(
    model: flags.Model,
    pipeline: flags.Pipeline = False,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 is any free one.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"What clients must send; or set {KEY_VARIABLE}. Other addresses than 127.0.0.1 need one."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Web page that may ask (CORS); repeat it."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name that clients see; requests may use any."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests at once, at most.")
    ] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get a 429.")] = 64,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt, at most; longer ones get a 400.")
    ] = None,
    max_kv_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="KV memory, such as 8GB, that requests wait rather than exceed."
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds for a request, at most.")
    ] = None,
    volatile_header: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="Lines 'NAME: …' at the start of a system prompt to leave out, so that what follows stays known; "
            f"repeat it, or give '' to keep all. By default Claude Code's {BILLING}.",
        ),
    ] = [BILLING],  # noqa: B006
    prefix_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"Room for what earlier prompts have read; by default {PREFIXES} in memory, {PREFIX_FILES} in files.",
        ),
    ] = None,
    prefix_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Keep it in this folder, too, so that it outlives the server."
        ),
    ] = None,
    prefix_dir_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Room for that; the oldest give way.")
    ] = PREFIX_FILES,
    chat_template_config: flags.ChatTemplateConfig = None,
    extra_eos_token: flags.ExtraEosToken = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "-m", min=1, help="Of an answer, where a request does not say."
        ),
    ] = 32768,
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    top_k: flags.TopK = 0,
    min_tokens_to_keep: flags.MinTokensToKeep = 1,
    xtc_probability: flags.XtcProbability = 0.0,
    xtc_threshold: flags.XtcThreshold = 0.1,
    kv_group_size: flags.KVGroupSize = 64,
    kv_bits: flags.KVBits = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    adapter_path: flags.AdapterPath = None,
    quantize_activations: flags.QuantizeActivations = False,
    trust_remote_code: flags.TrustRemoteCode = False,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = VERIFY_BELOW,
    far: flags.Far = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs to agents and apps on this Mac, on compressed KV caches.

    \b
      mlx-snapkv serve --model demo --snapkv top_k=1024 --memory recall
      curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    require_server("serve")
    from ..batch.openai_request import Defaults
    from ..caches.memories import in_files
    from ..engine.recalling import Recall
    from ..policies import resolve_policy
    from ..server.access import Settings
    from ..server.admission import Limits
    from ..server.engine import Engine, Loaded
    from ..server.metrics import Metrics
    from ..server.prefix_cache import PrefixCache
    from ..server.prefix_files import PrefixFiles, tokenizer_digest
    from ..server.run import listening
    from ..server.run import serve as run
    from ..server.shared_engine import SharedEngine
    from ..several.ranks import here
    from .sharded import require_alone

    require_alone(prefix_dir=prefix_dir)
    ranks = here()
    settings = None
    if ranks.rank == 0:
        settings = Settings(
            host,
            port,
            api_key or os.environ.get(KEY_VARIABLE) or None,
            tuple(allow_origin or ()),
            timeout=timeout,
            volatile_headers=tuple(volatile_header),
        )
    chosen = resolve_policy(snapkv, policy)
    recall = Recall(memory, verify, verify_below, far)
    usual = PREFIX_FILES if in_files(memory) else PREFIXES
    n_prefix_bytes = n_bytes("--prefix-bytes", prefix_bytes or usual)
    # Of several ranks, rank 0 says what is given up for room.
    prefixes = PrefixCache(sys.maxsize if ranks.rank else n_prefix_bytes, ranks.first)
    defaults = Defaults(
        max_tokens,
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        min_tokens_to_keep=min_tokens_to_keep,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
    )

    def load() -> Loaded:
        loaded, tokenizer = load_for_requests(
            model,
            adapter_path,
            defaults,
            trust_remote_code=trust_remote_code,
            quantize_activations=quantize_activations,
            extra_eos_token=extra_eos_token,
            chat_template_config=chat_template_config,
            pipeline=pipeline,
        )
        return Loaded(loaded, tokenizer, (model, *(alias or ())))

    n_kv_bytes = most_kv_bytes(max_kv_bytes)
    n_file_bytes = n_bytes("--prefix-dir-bytes", prefix_dir_bytes)
    bits = "None" if kv_bits is None else f"{kv_bits} in groups of {kv_group_size}"
    setting = {"policy": str(chosen), "memory": memory, "far": str(far), "kv_bits": bits}

    def open_files(found: Loaded) -> PrefixFiles | None:
        if prefix_dir is None:
            return None
        told = setting | {"tokenizer": tokenizer_digest(found.tokenizer)}
        folder = path_of(prefix_dir, "--prefix-dir")
        return PrefixFiles(folder, n_file_bytes, found.model, told)

    listen()  # here, since the model is loaded in another thread, which may not
    options = batch_options(chosen, prefill_step_size, kv_bits, kv_group_size, recall)
    limits = Limits(concurrency, queue, max_context, n_kv_bytes)
    given = load, options, prefixes, limits, defaults, Metrics(), open_files
    if settings is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 stops all
        SharedEngine(ranks, *given).follow()
        os._exit(0)  # with rank 0 gone, MLX's threads would abort the usual exit
    with listening(settings) as place:
        engine = Engine(*given) if ranks.size == 1 else SharedEngine(ranks, *given)
        address = place.getsockname()
        url = f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"
        started = partial(print, _first_line(model, url), flush=True)
        run(engine, settings, place, started)


def _first_line(model: str, url: str) -> str:
    clients = f"OpenAI clients: base_url={url}/v1 | Claude Code: ANTHROPIC_BASE_URL={url}"
    return f"{model} at {url} (a page to ask at) | {clients} | its API: {url}/docs | Ctrl-C stops"


def require_server(what: str, *more: str) -> None:
    """Raises: SnapKVError: the packages of the extra, or more, are not installed."""
    for package in ("fastapi", "uvicorn", "prometheus_client", *more):
        if find_spec(package) is None:
            raise SnapKVError(
                f"{what} needs {package}, which is not installed: run pip install 'mlx-snapkv[server]'"
            )
