"""Figures of the server, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters that the engine and the handlers keep, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._responses = Counter(
            "mlx_snapkv_responses", "Responses", ["path", "status"], registry=registry
        )
        self._open = Gauge("mlx_snapkv_open_requests", "Waiting or answered", registry=registry)
        self._prompt = Counter("mlx_snapkv_prompt_tokens", "Of prompts", registry=registry)
        self._cached = Counter(
            "mlx_snapkv_cached_tokens", "Of prompts, read by an earlier request", registry=registry
        )
        self._hits = Counter(
            "mlx_snapkv_prefix_hits", "Prompts with a known prefix", registry=registry
        )
        self._answered = Counter("mlx_snapkv_generated_tokens", "Of answers", registry=registry)
        self._first = Histogram(
            "mlx_snapkv_first_token_seconds",
            "From the request to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self._bytes = Gauge(
            "mlx_snapkv_kv_bytes", "Bytes of keys and values", ["kind"], registry=registry
        )

    def track(self, kind: str, read: Callable[[], float]) -> None:
        """Ask for the KV bytes of a kind whenever somebody looks."""
        self._bytes.labels(kind).set_function(read)

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def opened(self) -> None:
        self._open.inc()

    def closed(self) -> None:
        self._open.dec()

    def started(self, n_prompt: int, n_cached: int) -> None:
        self._prompt.inc(n_prompt)
        self._cached.inc(n_cached)
        self._hits.inc(n_cached > 0)

    def generated(self, seconds: float | None) -> None:
        """A token of an answer; the first comes with the seconds it took."""
        self._answered.inc()
        if seconds is not None:
            self._first.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
