"""Figures of the server, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters that the engine and the handlers keep, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        about = {"namespace": "mlx_snapkv", "registry": self._registry}
        self._responses = Counter("responses", "Responses by endpoint and status", ["path", "status"], **about)
        self._open = Gauge("open_requests", "Requests that wait, are read or answered", **about)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts", **about)
        self._cached = Counter("cached_tokens", "Tokens of prompts that an earlier request had read", **about)
        self._hits = Counter("prefix_hits", "Prompts of which a prefix was known", **about)
        self._answered = Counter("generated_tokens", "Tokens of answers", **about)
        self._first = Histogram(
            "first_token_seconds", "Seconds from the request to its first token", buckets=SECONDS, **about
        )
        self._bytes = Gauge("kv_bytes", "Bytes of keys and values", ["kind"], **about)

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
