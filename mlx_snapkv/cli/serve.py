"""`mlx-snapkv serve`: run a local server for agents and apps."""

from __future__ import annotations

import os
import signal
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
from .command import KV_CACHE, SERVER
from .loading import require_one_process
from .options import parse_bytes
from .process import raise_on_interrupt
from .prompt_console import PromptConsole

if TYPE_CHECKING:
    from ..planning.config import CompressionConfig
    from ..planning.prefixes import PrefixCacheSize
    from ..server.access import Settings
    from ..server.engine import Engine
    from ..server.prefix_files import PrefixFiles
    from ..server.requests import Loaded

DEFAULT_PREFIX_DIR_SIZE = "20GB"


@dataclass(frozen=True)
class HTTPOptions:
    """Options for the HTTP server, such as its address and access control."""

    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 means any free port.")] = 8080
    api_key: Annotated[
        str | None,
        Option(help="Key that clients must send; required if --host is not this machine."),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        Option(
            help="Origin whose pages may send requests (CORS); repeatable.", rich_help_panel=SERVER
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        Option(
            help="Another host name of this machine, for clients without a key; repeatable.",
            rich_help_panel=SERVER,
        ),
    ] = None
    alias: Annotated[
        list[str] | None,
        Option(help="Another name for the model; repeatable.", rich_help_panel=SERVER),
    ] = None
    timeout: Annotated[
        float | None, Option(min=0.1, help="Maximum seconds per request.", rich_help_panel=SERVER)
    ] = None
    volatile_header: Annotated[
        list[str],
        Option(
            help="NAME of 'NAME: …' lines dropped from system prompts; default: Claude Code's.",
            show_default=False,
            rich_help_panel=SERVER,
        ),
    ] = field(default_factory=lambda: [BILLING])

    def settings(self) -> Settings:
        """Return the HTTP server's settings. Raises: SnapKVError: they are unsafe or invalid."""
        from ..server.access import Settings

        return Settings(
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            origins=tuple(self.allow_origin or ()),
            hosts=tuple(self.allow_host or ()),
            timeout=self.timeout,
            volatile_headers=tuple(self.volatile_header),
        )


@dataclass(frozen=True)
class LimitOptions:
    """Limits on the number and length of requests."""

    concurrency: options.Concurrency = 8
    queue: Annotated[
        int,
        Option(
            min=0,
            help="Maximum number of waiting requests; others get a 429.",
            rich_help_panel=SERVER,
        ),
    ] = 64
    max_context: Annotated[
        int | None, Option(min=1, help="Maximum prompt length in tokens; longer prompts get a 400.")
    ] = None


@dataclass(frozen=True)
class PrefixOptions:
    """Options for the prefix cache, in memory and on disk."""

    prefix_bytes: Annotated[
        int | None,
        Option(
            parser=parse_bytes,
            help="Size of the prefix cache, such as 8GB; default: by memory and model.",
            rich_help_panel=KV_CACHE,
        ),
    ] = None
    prefix_dir: Annotated[
        str | None, Option(help="Also keep prefixes in this folder, across restarts.")
    ] = None
    prefix_dir_bytes: Annotated[
        Any,
        Option(
            parser=parse_bytes,
            help="Limit of --prefix-dir; the oldest prefixes are deleted.",
            rich_help_panel=KV_CACHE,
        ),
    ] = DEFAULT_PREFIX_DIR_SIZE

    def files(
        self, identity: dict[str, str], store_dir: str | None, model, tokenizer
    ) -> PrefixFiles | None:
        """Return the prefix cache's files for this model and these settings, or None without --prefix-dir.

        Args:
            identity: settings that entries depend on; see `CompressionConfig.identity`.
            store_dir: folder for the temporary files of loaded prefixes; see `Sparse`.
            model: the served model.
            tokenizer: the model's tokenizer.
        """
        from ..server.prefix_files import PrefixFiles, tokenizer_digest

        if self.prefix_dir is None:
            return None
        folder = path_of(self.prefix_dir, "--prefix-dir")
        identity = identity | {"tokenizer": tokenizer_digest(tokenizer)}
        return PrefixFiles(folder, self.prefix_dir_bytes, model, identity, store_dir)


@dataclass(frozen=True)
class AnswerOptions(options.SamplingOptions):
    """Sampling options and maximum answer length for requests that don't set their own."""

    max_tokens: Annotated[
        int,
        Option(
            "--max-tokens",
            "-m",
            min=1,
            help="Maximum answer tokens, if a request sets none.",
        ),
    ] = 32768


def serve(
    *,
    model_options: options.ShardedModelOptions,
    compression: cache_options.CompressionOptions,
    http: HTTPOptions,
    limits: LimitOptions,
    prefixes: PrefixOptions,
    cache: cache_options.CacheOptions,
    sampling: AnswerOptions,
) -> None:
    r"""Serve the OpenAI and Anthropic APIs to agents and apps on this Mac.

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

    require_one_process(prefix_dir=prefixes.prefix_dir, pipeline=model_options.pipeline)
    settings = http.settings() if rank() == 0 else None  # only rank 0 listens
    setting = compression.setting_for_task(
        model_options.model, "conversation", PromptConsole().say, vars(cache)
    )
    generation = {"policy": setting, **vars(cache)}
    loader = _Loader(
        model_options=model_options,
        cache=cache,
        names=(model_options.model, *(http.alias or ())),
        sampling=sampling,
        limits=limits,
        prefixes=prefixes,
        options=generation,
        config=CompressionConfig.from_keywords(generation)[0],
    )
    # Call this before another thread loads the model, because only the main thread can set signal handlers.
    raise_on_interrupt()
    start_engine = partial(
        Engine,
        load=loader.load,
        options=generation,
        limits=Limits(
            concurrency=limits.concurrency,
            queue=limits.queue,
            context=limits.max_context,
            kv_bytes=model_options.max_kv_bytes,
        ),
        defaults=Defaults(**vars(sampling)),
    )
    _run(settings, loader, start_engine)


@dataclass
class _Loader:
    """Loads the model in the engine's thread, and creates its prefix cache.

    Attributes:
        names: model names that clients may use.
        options: `generate_step` keywords for every request.
        config: the same settings as `options`.
        cache_size: size limit of the prefix cache, the same on all ranks. None before the model is loaded.
    """

    model_options: options.ShardedModelOptions
    cache: cache_options.CacheOptions
    names: tuple[str, ...]
    sampling: AnswerOptions
    limits: LimitOptions
    prefixes: PrefixOptions
    options: dict[str, Any]
    config: CompressionConfig
    cache_size: PrefixCacheSize | None = None

    def load(self) -> Loaded:
        """Load the model and create its prefix cache. Raises: SnapKVError: it can't be served with these options."""
        from ..models.distributed import from_first_rank
        from ..planning.machine import this_machine
        from ..planning.prefixes import prefix_cache_size
        from ..server.prefix_cache import PrefixCache
        from ..server.requests import Loaded

        model, tokenizer = self.model_options.load()
        self.cache.require_supported(model)
        PromptConsole().say_all(self.cache.bits_notes())
        self.sampling.require_within_vocabulary(tokenizer)
        compute_size = partial(
            prefix_cache_size,
            model,
            self.options,
            this_machine(),
            user_limit=self.prefixes.prefix_bytes,
            max_kv_bytes=self.model_options.max_kv_bytes,
            max_context=self.limits.max_context,
        )
        self.cache_size = from_first_rank(compute_size)
        config = self.config
        files = self.prefixes.files(config.identity, config.store_dir, model, tokenizer)
        return Loaded(model, tokenizer, self.names, PrefixCache(self.cache_size.limit, files))


def _require_packages() -> None:
    """Check that the server's packages are installed. Raises: SnapKVError."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise SnapKVError(f"serve needs {package}: run pip install 'mlx-snapkv[server]'")


def _run(settings: Settings | None, loader: _Loader, start_engine: Callable[[], Engine]) -> None:
    """Serve requests until the user stops the server.

    Args:
        settings: HTTP server settings on rank 0. None on other ranks, which follow rank 0.
        loader: the model's loader. Its `cache_size` is set once the engine has started.
        start_engine: creates and starts the engine.
    """
    from ..server.app import bind_socket, serve
    from ..server.log import show_log

    if settings is None:  # not rank 0
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 stops all ranks
        engine = start_engine()
        engine.join()
        os._exit(0)  # rank 0 is gone, so MLX's threads would abort during sys.exit
    show_log()
    with bind_socket(settings) as listening_socket:
        engine = start_engine()
        host, port, *_ = listening_socket.getsockname()
        is_ipv6 = ":" in host
        url = f"http://[{host}]:{port}" if is_ipv6 else f"http://{host}:{port}"

        def print_address(_: Any) -> None:
            """Print the server's address and the size of its prefix cache. Called once the server accepts requests."""
            clients = f"OpenAI clients: base_url={url}/v1 | Claude Code: ANTHROPIC_BASE_URL={url}"
            line = f"{loader.names[0]} at {url} (chat page) | {clients} | API: {url}/docs | Ctrl-C stops"
            print(line, loader.cache_size, sep="\n", flush=True)

        serve(engine, settings, listening_socket, print_address)
