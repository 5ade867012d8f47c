"""`mlx-snapkv serve`: a local server for agents and apps."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError
from ..paths import path_of
from ..server import BILLING
from . import cache_options, options
from .batch import load_for_requests, most_kv_bytes, take_before
from .options import n_bytes
from .process import listen

if TYPE_CHECKING:
    from ..server.access import Settings
    from ..server.admission import Limits
    from ..server.engine import Loaded
    from ..server.prefix_files import PrefixFiles

PREFIXES = "4GB"
PREFIX_FILES = "20GB"


@dataclass(frozen=True)
class HTTPOptions:
    """Where the server listens, and to whom."""

    host: Annotated[str, Option(help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen at; 0 is any free one.")] = 8080
    api_key: Annotated[
        str | None,
        Option(
            help="What clients must send; or set MLX_SNAPKV_API_KEY. Other addresses than 127.0.0.1 need one."
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None, Option(metavar="URL", help="Web page that may ask (CORS); repeat it.")
    ] = None
    alias: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Another name that clients see; requests may use any."),
    ] = None
    timeout: Annotated[float | None, Option(min=0.1, help="Seconds for a request, at most.")] = None
    volatile_header: Annotated[
        list[str],
        Option(
            metavar="NAME",
            help="Lines 'NAME: …' at the start of a system prompt to leave out, so that what follows stays known; "
            f"repeat it, or give '' to keep all. By default Claude Code's {BILLING}.",
        ),
    ] = field(default_factory=lambda: [BILLING])

    def settings(self) -> Settings:
        from ..server.access import Settings

        return Settings(
            self.host,
            self.port,
            self.api_key or None,
            tuple(self.allow_origin or ()),
            timeout=self.timeout,
            volatile_headers=tuple(self.volatile_header),
        )


@dataclass(frozen=True)
class LimitOptions:
    """What the server takes on at once."""

    concurrency: options.Concurrency = 8
    queue: Annotated[int, Option(min=0, help="Requests that may wait; more get a 429.")] = 64
    max_context: Annotated[
        int | None, Option(min=1, help="Tokens of a prompt, at most; longer ones get a 400.")
    ] = None
    max_kv_bytes: options.MaxKVBytes = None

    def limits(self) -> Limits:
        from ..server.admission import Limits

        n_kv_bytes = most_kv_bytes(self.max_kv_bytes)
        return Limits(self.concurrency, self.queue, self.max_context, n_kv_bytes)


@dataclass(frozen=True)
class PrefixOptions:
    """What stays of the prompts that have been read."""

    prefix_bytes: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help=f"Room for what earlier prompts have read; by default {PREFIXES} in memory, {PREFIX_FILES} in files.",
        ),
    ] = None
    prefix_dir: Annotated[
        str | None,
        Option(metavar="DIR", help="Keep it in this folder, too, so that it outlives the server."),
    ] = None
    prefix_dir_bytes: Annotated[
        str, Option(metavar="SIZE", help="Room for that; the oldest give way.")
    ] = PREFIX_FILES

    def most_bytes(self, memory: str) -> int:
        """What --prefix-bytes says; by default for entries where this memory has them."""
        from ..caches.memories import in_files

        usual = PREFIX_FILES if in_files(memory) else PREFIXES
        return n_bytes("--prefix-bytes", self.prefix_bytes or usual)

    def files(self, setting: dict[str, str], found: Loaded) -> PrefixFiles | None:
        """The folder of prefixes, if there is one, for this model and what is set about its entries."""
        from ..server.prefix_files import PrefixFiles, tokenizer_digest

        if self.prefix_dir is None:
            return None
        folder = path_of(self.prefix_dir, "--prefix-dir")
        n_file_bytes = n_bytes("--prefix-dir-bytes", self.prefix_dir_bytes)
        told = setting | {"tokenizer": tokenizer_digest(found.tokenizer)}
        return PrefixFiles(folder, n_file_bytes, found.model, told)


@dataclass(frozen=True)
class AnswerOptions(options.SamplingOptions):
    """Sampling and length where a request does not say."""

    max_tokens: Annotated[
        int,
        Option("--max-tokens", "-m", min=1, help="Of an answer, where a request does not say."),
    ] = 32768


def serve(
    *,
    model: options.ShardedModelOptions,
    http: HTTPOptions,
    limits: LimitOptions,
    prefixes: PrefixOptions,
    tokenizer: options.TokenizerOptions,
    sampling: AnswerOptions,
    cache: cache_options.CacheOptions,
    policy: cache_options.AutoPolicyOptions,
    retention: cache_options.RetentionOptions,
) -> None:
    """Serve OpenAI's and Anthropic's APIs to agents and apps on this Mac, on compressed KV caches.

    \b
      mlx-snapkv serve --model demo --snapkv top_k=1024 --memory recall
      curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    require_server("serve")
    from ..completions.request import Defaults
    from ..server.engine import Loaded
    from ..server.metrics import Metrics
    from ..server.prefix_cache import PrefixCache
    from ..several.ranks import here
    from .sharded import require_alone

    require_alone(prefix_dir=prefixes.prefix_dir)
    ranks = here()
    settings = http.settings() if ranks.rank == 0 else None
    chosen = policy.resolve()
    ways = {"policy": chosen, **retention.keywords()}
    if policy.is_auto:
        ways |= take_before(policy, model.model, "conversation", retention.memory)
    n_prefix_bytes = prefixes.most_bytes(ways["memory"])
    n_bytes("--prefix-dir-bytes", prefixes.prefix_dir_bytes)  # which finds mistakes

    def load() -> Loaded:
        found = load_for_requests(model, tokenizer, sampling)
        return Loaded(*found, (model.model, *(http.alias or ())))

    bits = f"{cache.kv_bits} in groups of {cache.kv_group_size}" if cache.kv_bits else "None"
    setting = {
        "policy": str(ways["policy"]),
        "memory": ways["memory"],
        "far": str(retention.far),
        "kv_bits": bits,
    }
    listen()  # here, since the model is loaded in another thread, which may not
    _run(
        settings,
        model.model,
        load,
        ways | cache.keywords(),
        # Of several ranks, rank 0 says what is given up for room.
        PrefixCache(sys.maxsize if ranks.rank else n_prefix_bytes, ranks.first),
        limits.limits(),
        Defaults(**vars(sampling)),
        Metrics(),
        partial(prefixes.files, setting),
    )


def _run(settings: Settings | None, model: str, *given: Any) -> None:
    """Serve until it is stopped, on rank 0; on the others, which have no settings, follow it.

    Args:
        given: what an `Engine` is made of.
    """
    from ..server.app import listening, serve
    from ..server.engine import Engine
    from ..server.shared_engine import SharedEngine
    from ..several.ranks import here

    ranks = here()
    if settings is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 stops all
        SharedEngine(ranks, *given).follow()
        os._exit(0)  # with rank 0 gone, MLX's threads would abort the usual exit
    with listening(settings) as place:
        engine = Engine(*given) if ranks.size == 1 else SharedEngine(ranks, *given)
        address = place.getsockname()
        url = f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"
        started = partial(print, _first_line(model, url), flush=True)
        serve(engine, settings, place, started)


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
