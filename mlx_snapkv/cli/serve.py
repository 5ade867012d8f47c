"""`mlx-snapkv serve`: a local server for agents and apps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError
from ..paths import path_of
from ..server import BILLING
from . import cache_options, options
from .loading import require_alone
from .options import n_bytes
from .process import listen
from .reading import Reading

if TYPE_CHECKING:
    from ..planning.prefixes import PrefixRoom
    from ..server.access import Settings
    from ..server.engine import Engine
    from ..server.prefix_cache import PrefixCache
    from ..server.prefix_files import PrefixFiles
    from ..server.requests import Loaded

PREFIX_FILES = "20GB"


@dataclass(frozen=True)
class HTTPOptions:
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 means any free port.")] = 8080
    api_key: Annotated[
        str | None,
        Option(
            help="Key that clients must send (or set MLX_SNAPKV_API_KEY); required unless --host is a loopback address."
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None, Option(help="Origin whose pages may send requests (CORS); repeatable.")
    ] = None
    allow_host: Annotated[
        list[str] | None,
        Option(
            help="Another name of this machine by which clients without a key may reach it, such as "
            "host.docker.internal; repeatable."
        ),
    ] = None
    alias: Annotated[list[str] | None, Option(help="Another name for the model; repeatable.")] = (
        None
    )
    timeout: Annotated[float | None, Option(min=0.1, help="Maximum seconds per request.")] = None
    volatile_header: Annotated[
        list[str],
        Option(
            help="NAME of header lines 'NAME: …' to drop from the start of a system prompt, so that the prefix "
            "cache matches the rest; repeatable; '' drops none. Default: Claude Code's."
        ),
    ] = field(default_factory=lambda: [BILLING])

    def settings(self) -> Settings:
        from ..server.access import Settings

        return Settings(
            self.host,
            self.port,
            self.api_key or None,
            tuple(self.allow_origin or ()),
            hosts=tuple(self.allow_host or ()),
            timeout=self.timeout,
            volatile_headers=tuple(self.volatile_header),
        )


@dataclass(frozen=True)
class LimitOptions(options.TogetherOptions):
    queue: Annotated[
        int, Option(min=0, help="Maximum number of waiting requests; further ones get a 429.")
    ] = 64
    max_context: Annotated[
        int | None, Option(min=1, help="Maximum prompt length in tokens; longer prompts get a 400.")
    ] = None


@dataclass(frozen=True)
class PrefixOptions:
    """What stays of the prompts that have been read."""

    prefix_bytes: Annotated[
        int | None,
        Option(
            parser=n_bytes,
            help=f"Size of the prefix cache; default: 4GB in memory, {PREFIX_FILES} in files, or what a prompt "
            f"of the model's "
            "context takes, up to half of what is free.",
        ),
    ] = None
    prefix_dir: Annotated[
        str | None, Option(help="Also keep prefixes in this folder, across restarts.")
    ] = None
    prefix_dir_bytes: Annotated[
        Any,
        Option(parser=n_bytes, help="Size limit of --prefix-dir; the oldest prefixes are deleted."),
    ] = PREFIX_FILES

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

    max_tokens: Annotated[
        int,
        Option(
            "--max-tokens",
            "-m",
            min=1,
            help="Maximum number of answer tokens, where a request does not set it.",
        ),
    ] = 32768


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
    """Serve OpenAI's and Anthropic's APIs to agents and apps on this Mac, with compressed KV caches or with --sparse.

    \b
      mlx-snapkv serve --model demo --sparse top_k=1024
      curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    _require_packages()
    from ..completions.body import Defaults
    from ..models.distributed import rank
    from ..planning.config import CompressionConfig
    from ..server.admission import Limits
    from ..server.engine import Engine
    from ..server.metrics import Metrics
    from ..server.prefix_cache import PrefixCache

    require_alone(prefix_dir=prefixes.prefix_dir, pipeline=model.pipeline)
    settings = None if rank() else http.settings()
    keywords = compression.served()
    compression.require_use()
    keywords |= cache_options.keywords_of(
        compression.recommend(model.model, None, "conversation", Reading().say, vars(cache))
    )
    generation = keywords | vars(cache)
    identity = CompressionConfig.taken_from(generation)[0].identity
    prefix_cache = PrefixCache(sys.maxsize)
    names = model.model, *(http.alias or ())
    loader = _Loader(model, names, sampling, limits, prefixes, generation, prefix_cache)
    listen()  # here, since the model is loaded in another thread, which may not
    start = partial(
        Engine,
        loader.load,
        generation,
        prefix_cache,
        Limits(limits.concurrency, limits.queue, limits.max_context, limits.max_kv_bytes),
        Defaults(**vars(sampling)),
        Metrics(),
        partial(prefixes.files, identity),
    )
    _run(settings, loader, start)


@dataclass
class _Loader:
    """Loads the model in the engine's thread, and gives the prefix cache its room, the same on all ranks."""

    model: options.ShardedModelOptions
    names: tuple[str, ...]  # by which clients may ask for it
    sampling: AnswerOptions
    limits: LimitOptions
    prefixes: PrefixOptions
    options: dict[str, Any]  # of a request's entries
    prefix_cache: PrefixCache
    room: PrefixRoom | None = None  # what the prefix cache may take, once the model is loaded

    def load(self) -> Loaded:
        """Load the model. Raises: SnapKVError: it can't be served with these options."""
        from ..models.distributed import from_first
        from ..planning.machine import this_machine
        from ..planning.prefixes import prefix_room
        from ..server.requests import Loaded

        model, tokenizer = self.model.load()
        self.sampling.generation(tokenizer)  # which finds mistakes
        room = partial(
            prefix_room,
            model,
            self.options,
            this_machine(),
            given=self.prefixes.prefix_bytes,
            max_kv_bytes=self.limits.max_kv_bytes,
            max_context=self.limits.max_context,
        )
        self.room = from_first(room)
        self.prefix_cache.allow(self.room.limit)
        return Loaded(model, tokenizer, self.names)


def _require_packages() -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise SnapKVError(f"serve needs {package}: run pip install 'mlx-snapkv[server]'")


def _run(settings: Settings | None, loader: _Loader, start: Callable[[], Engine]) -> None:
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
        line = (
            f"{loader.names[0]} at {url} (chat page) | {clients} | API: {url}/docs | Ctrl-C stops"
        )
        serve(
            engine, settings, place, lambda server: print(line, loader.room, sep="\n", flush=True)
        )
