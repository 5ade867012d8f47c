"""`mlx-snapkv serve`: a local server for agents and apps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import SnapKVError
from ..paths import path_of
from ..server import BILLING
from . import cache_options, options
from .command import option
from .loading import require_alone
from .options import n_bytes
from .process import listen
from .reading import Reading

if TYPE_CHECKING:
    from ..planning.prefixes import PrefixRoom
    from ..server.access import Settings
    from ..server.engine import Engine
    from ..server.prefix_files import PrefixFiles
    from ..server.requests import Loaded

PREFIX_FILES = "20GB"


@dataclass(frozen=True)
class HTTPOptions:
    host: str = option("Address to listen on.", "127.0.0.1")
    port: int = option("Port to listen on; 0 means any free port.", 8080)
    api_key: str | None = option(
        "Key that clients must send (or set MLX_SNAPKV_API_KEY); required unless --host is a loopback address."
    )
    allow_origin: list[str] | None = option(
        "Origin whose pages may send requests (CORS); repeatable."
    )
    allow_host: list[str] | None = option(
        "Another name of this machine by which clients without a key may reach it, such as host.docker.internal; "
        "repeatable."
    )
    alias: list[str] | None = option("Another name for the model; repeatable.")
    timeout: float | None = option("Maximum seconds per request.", min=0.1)
    volatile_header: list[str] = option(
        "NAME of header lines 'NAME: …' to drop from the start of a system prompt, so that the prefix cache matches "
        "the rest; repeatable; '' drops none. Default: Claude Code's.",
        [BILLING],
    )

    def settings(self) -> Settings:
        from ..server.access import Settings

        origins, headers = tuple(self.allow_origin or ()), tuple(self.volatile_header)
        how: Any = {"timeout": self.timeout, "volatile_headers": headers}
        how["hosts"] = tuple(self.allow_host or ())
        return Settings(self.host, self.port, self.api_key or None, origins, **how)


@dataclass(frozen=True)
class LimitOptions(options.TogetherOptions):
    queue: int = option("Maximum number of waiting requests; further ones get a 429.", 64, min=0)
    max_context: int | None = option(
        "Maximum prompt length in tokens; longer prompts get a 400.", min=1
    )


@dataclass(frozen=True)
class PrefixOptions:
    """What stays of the prompts that have been read."""

    prefix_bytes: int | None = option(
        f"Size of the prefix cache; default: 4GB in memory, {PREFIX_FILES} in files, or what a prompt of the model's "
        "context takes, up to half of what is free.",
        parser=n_bytes,
    )
    prefix_dir: str | None = option("Also keep prefixes in this folder, across restarts.")
    prefix_dir_bytes: int = option(
        "Size limit of --prefix-dir; the oldest prefixes are deleted.", PREFIX_FILES, parser=n_bytes
    )

    def files(self, setting: dict[str, str], loaded: Loaded) -> PrefixFiles | None:
        """The folder of prefixes, if there is one, for this model and what is set about its entries."""
        from ..server.prefix_files import PrefixFiles, tokenizer_digest

        if self.prefix_dir is None:
            return None
        folder = path_of(self.prefix_dir, "--prefix-dir")
        about = setting | {"tokenizer": tokenizer_digest(loaded.tokenizer)}
        return PrefixFiles(folder, self.prefix_dir_bytes, loaded.model, about)


@dataclass(frozen=True)
class AnswerOptions(options.SamplingOptions):
    """Sampling and length where a request does not say."""

    max_tokens: int = option(
        "Maximum number of answer tokens, where a request does not set it.", 32768, "-m", min=1
    )


def serve(
    *,
    model: options.ShardedModelOptions,
    http: HTTPOptions,
    limits: LimitOptions,
    prefixes: PrefixOptions,
    sampling: AnswerOptions,
    cache: cache_options.CacheOptions,
    compression: cache_options.CompressionOptions,
) -> None:
    """Serve OpenAI's and Anthropic's APIs to agents and apps on this Mac, with compressed KV caches.

    \b
      mlx-snapkv serve --model demo --sparse top_k=1024
      curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise SnapKVError(f"serve needs {package}: run pip install 'mlx-snapkv[server]'")
    from ..completions.request import Defaults
    from ..planning.machine import this_machine
    from ..planning.prefixes import prefix_room
    from ..server.admission import Limits
    from ..server.engine import Engine
    from ..server.metrics import Metrics
    from ..server.prefix_cache import PrefixCache
    from ..server.requests import Loaded
    from ..several.ranks import here

    require_alone(prefix_dir=prefixes.prefix_dir)
    ranks = here()
    settings = None if ranks.rank else http.settings()
    keywords = compression.keywords()
    keywords |= compression.take(model.model, None, "conversation", Reading().say, vars(cache))
    # Of several ranks, rank 0 says what is given up for room.
    kept = PrefixCache(sys.maxsize, ranks.first)
    rooms: list[PrefixRoom] = []
    generation = keywords | vars(cache)

    def room(loaded: Any) -> PrefixRoom:
        return prefix_room(
            loaded,
            generation,
            this_machine(),
            given=prefixes.prefix_bytes,
            max_kv_bytes=limits.max_kv_bytes,
            max_context=limits.max_context,
        )

    def load() -> Loaded:
        loaded, tokenizer = model.load()
        sampling.generation(tokenizer)  # which finds mistakes
        if not ranks.rank:
            rooms.append(room(loaded))
            kept.allow(rooms[0].limit)
        return Loaded(loaded, tokenizer, (model.model, *(http.alias or ())))

    bits = f"{cache.kv_bits} in groups of {cache.kv_group_size}" if cache.kv_bits else None
    about = keywords | {"kv_bits": bits}
    setting = {name: str(about[name]) for name in ("policy", "memory", "far", "kv_bits")}
    listen()  # here, since the model is loaded in another thread, which may not
    most = Limits(limits.concurrency, limits.queue, limits.max_context, limits.max_kv_bytes)
    start = partial(
        Engine,
        load,
        generation,
        kept,
        most,
        defaults=Defaults(**vars(sampling)),
        metrics=Metrics(),
        open_files=partial(prefixes.files, setting),
        ranks=ranks,
    )
    _run(settings, model.model, rooms, start)


def _run(
    settings: Settings | None, model: str, rooms: list[PrefixRoom], start: Callable[[], Engine]
) -> None:
    """Serve until it is stopped, on rank 0; on the others, which have no settings, follow it."""
    from ..server.app import listening, serve

    if settings is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 stops all
        start().join()
        os._exit(0)  # with rank 0 gone, MLX's threads would abort the usual exit
    with listening(settings) as place:
        engine = start()
        host, port, *_ = place.getsockname()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        clients = f"OpenAI clients: base_url={url}/v1 | Claude Code: ANTHROPIC_BASE_URL={url}"
        line = f"{model} at {url} (chat page) | {clients} | API: {url}/docs | Ctrl-C stops"
        serve(engine, settings, place, partial(print, line, *rooms, sep="\n", flush=True))
