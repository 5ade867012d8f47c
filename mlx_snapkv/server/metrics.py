"""The server's Prometheus metrics."""

from functools import partial
from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds


class Metrics:
    """Metrics of the engine and of HTTP responses."""

    def __init__(self) -> None:
        """Create the metrics in their own registry, so that one process can run several servers."""
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        gauge = partial(Gauge, registry=self._registry)
        self.responses = counter("mlx_snapkv_responses", "Responses", ["path", "status"])
        self.open_requests = gauge("mlx_snapkv_open_requests", "Requests waiting or being answered")
        self.prompt_tokens = counter("mlx_snapkv_prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter(
            "mlx_snapkv_cached_tokens", "Prompt tokens taken from the prefix cache"
        )
        self.prefix_hits = counter("mlx_snapkv_prefix_hits", "Prompts with a cached prefix")
        self.generated_tokens = counter("mlx_snapkv_generated_tokens", "Generated tokens")
        self.first_token_seconds = Histogram(
            "mlx_snapkv_first_token_seconds",
            "Time to the first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._kv_bytes = gauge("mlx_snapkv_kv_bytes", "Bytes of keys and values", ["kind"])
        memory_bytes = gauge("mlx_snapkv_memory_bytes", "Bytes that MLX has allocated", ["kind"])
        memory_bytes.labels("arrays").set_function(mx.get_active_memory)
        memory_bytes.labels("freed_buffers").set_function(mx.get_cache_memory)

    def track(self, engine: Any) -> None:
        """Report an engine's KV bytes whenever the metrics are read. Call this after the model is loaded."""
        prefixes = engine.loaded.prefixes
        self._kv_bytes.labels("requests").set_function(lambda: engine.kv_bytes)
        self._kv_bytes.labels("prefixes").set_function(lambda: prefixes.nbytes)
        self._kv_bytes.labels("prefix_files").set_function(lambda: prefixes.file_nbytes)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
