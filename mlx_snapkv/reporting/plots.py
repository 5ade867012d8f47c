"""The plots of a result: decoding speed and KV memory against context length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from .ownership import PNG_METADATA

KINDS = {
    "full": ("full cache", "tab:gray"),
    "rotating": ("max-kv-size, same entries as SnapKV", "tab:olive"),
    "quantized": ("kv-bits", "tab:blue"),
    "snapkv": ("SnapKV", "tab:red"),
}

PLOTS = ("decoding", "memory")


def require_matplotlib() -> None:
    """Raises: SnapKVError: matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SnapKVError(
            "the plots need matplotlib: pip install 'mlx-snapkv[plots]', or leave --output out"
        ) from None


def write_plots(result: dict[str, Any], base: Path) -> list[Path]:
    """Decoding speed and KV memory against context length, as `base`-decoding.png and `base`-memory.png."""
    speed, memory = (base.with_name(f"{base.name}-{plot}.png") for plot in PLOTS)
    _plot(result, "tokens_per_second", "decoded tokens/s", speed)
    _plot(result, "kv_bytes", "bytes of keys and values", memory)
    return [speed, memory]


def _plot(result: dict[str, Any], key: str, label: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, color, style, points in _lines(result["decode"], key):
        axes.plot(*zip(*points), marker="o", label=name, color=color, linestyle=style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    contexts = sorted({r["context"] for r in result["decode"]})
    axes.set_xticks(contexts, [f"{c // 1024}k" if c >= 1024 else str(c) for c in contexts])
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel(label)
    axes.set_title(result["model"], fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, metadata=PNG_METADATA)


def _lines(records: list[dict[str, Any]], key: str):
    """Name, colour, line style and points of every line; kv-bits 8 and 4 are two lines of one colour."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for r in records:
        if r["kind"] in KINDS:
            name = r["contender"] if r["kind"] == "quantized" else KINDS[r["kind"]][0]
            points.setdefault((name, r["kind"]), []).append((r["context"], r[key]))
    for (name, kind), line in points.items():
        yield name, KINDS[kind][1], "--" if name.endswith(" 4") else "-", sorted(line)
