"""What a large model takes on several Macs, and what goes between them: arithmetic, and no measurement.

python scripts/several_macs.py     # prints the tables of docs/several-macs.md
"""

from __future__ import annotations

from dataclasses import dataclass

from readme_tables import between
from results_page import table

from mlx_snapkv.engine.report import format_bytes

MACS = (2, 4)
LENGTHS = {"128k": 131_072, "1M": 1_048_576}
BUDGET = 8192  # entries kept by KV head
BITS = 4.5  # of a weight, quantised to 4 bits in groups of 64
TWO = 2  # bytes of a bfloat16
BLOCK = 512  # tokens between two evictions


@dataclass(frozen=True)
class Model:
    """A published model's figures.

    Attributes:
        parameters, active: billions, all and those that a token reads.
        layers, full: all, and those whose KV cache grows with the prompt.
        hidden, kv_heads, head_dim: sizes of those.
        kinds: how mlx-lm splits it.
    """

    name: str
    parameters: float
    active: float
    layers: int
    full: int
    hidden: int
    kv_heads: int
    head_dim: int
    kinds: tuple[str, ...]

    @property
    def weight_bytes(self) -> float:
        return self.parameters * 1e9 * BITS / 8

    def kv_bytes(self, entries: int) -> int:
        """Of so many entries by head, in all layers."""
        return 2 * self.full * self.kv_heads * self.head_dim * TWO * entries


MODELS = (
    Model("70B dense (Llama 3.3)", 70.6, 70.6, 80, 80, 8192, 8, 128, ("tensor",)),
    Model("80B hybrid (Qwen3-Next)", 79.7, 3.0, 48, 12, 2048, 2, 256, ("pipeline",)),
    Model("480B mixture (Qwen3-Coder)", 480.0, 35.0, 62, 62, 6144, 8, 128, ("tensor", "pipeline")),
)


@dataclass(frozen=True)
class Link:
    """A cable: its nominal bytes a second, and the seconds that we assume one exchange takes."""

    name: str
    speed: float
    latency: float


LINKS = (
    Link("10 Gb Ethernet, TCP", 1.25e9, 100e-6),
    Link("Thunderbolt 4, TCP", 5e9, 100e-6),
    Link("Thunderbolt 5, RDMA", 10e9, 10e-6),
)
MEMORY_SPEED = 800e9  # bytes a second that a Mac's memory is read at, about an M3 Ultra's
COMPUTE = 25e12  # operations a second that we assume for long prompts on such a Mac


def token_bytes(model: Model, kind: str, n: int) -> float:
    """Bytes that each Mac sends for a token decoded.

    Split by heads, two sums a layer, each of which takes a ring 2 (n - 1) / n of the array; by layers, one array on to
    the next Mac, and the last one's gathered by all.
    """
    array = model.hidden * TWO
    return model.layers * 2 * array * 2 * (n - 1) / n if kind == "tensor" else array * n


def exchanges(model: Model, kind: str, n: int) -> int:
    """Messages of a token that wait for each other."""
    return model.layers * 2 * 2 * (n - 1) if kind == "tensor" else 2 * (n - 1)


def prompt_bytes(model: Model, kind: str, n: int) -> float:
    """Bytes that each Mac sends for a token of the prompt, whose logits nobody needs."""
    return token_bytes(model, "tensor", n) if kind == "tensor" else model.hidden * TWO


def compression_bytes(model: Model, kind: str, n: int, tokens: int) -> dict[str, float]:
    """By policy, bytes that each Mac sends to choose the entries of a prompt, float32; reports, 1 kB, left out."""
    ring, layers = 2 * (n - 1) / n, model.full
    if kind == "pipeline":  # all heads of a layer are on one Mac
        return {"each head by itself": 0.0, "heads alike": 0.0, "adaptive": 32 * 4 * ring}
    evictions = max(0, tokens - BUDGET) / BLOCK
    return {
        "each head by itself": layers * 3 * 4 * ring,
        "heads alike": layers * tokens * 4 * ring,
        "heads alike, in blocks": layers * evictions * (BUDGET + BLOCK) * 4 * ring,
        "adaptive": (32 + layers * 4) * 4 * ring,
    }


def memory_table() -> list[str]:
    head = (
        "model",
        "Macs",
        "split by",
        "weights a Mac",
        *(f"KV a Mac, {n}" for n in LENGTHS),
        f"{BUDGET:,} kept",
    )
    rows = []
    for model in MODELS:
        for n in MACS:
            for kind in model.kinds:
                sizes = [model.kv_bytes(tokens) / n for tokens in (*LENGTHS.values(), BUDGET)]
                kv = map(format_bytes, sizes)
                rows.append((model.name, str(n), kind, format_bytes(model.weight_bytes / n), *kv))
    return table(head, rows)


def wire_table() -> list[str]:
    head = ("model", "Macs", "split by", "a token decoded", "a prompt of 128k", *_POLICIES)
    rows = []
    for model in MODELS:
        for n in MACS:
            for kind in model.kinds:
                tokens = LENGTHS["128k"]
                compressed = compression_bytes(model, kind, n, tokens)
                sizes = (
                    token_bytes(model, kind, n),
                    prompt_bytes(model, kind, n) * tokens,
                    *(compressed.get(name) for name in _POLICIES),
                )
                cells = ("–" if size is None else format_bytes(size) for size in sizes)
                rows.append((model.name, str(n), kind, *cells))
    return table(head, rows)


_POLICIES = ("each head by itself", "heads alike", "heads alike, in blocks", "adaptive")


def time_table() -> list[str]:
    head = ("model", "Macs", "split by", "link", "wire a token", "memory, full 128k", f"memory, {BUDGET:,} kept",
            "wire a prompt of 128k", "its compute", "wire of the costliest policy")  # fmt: skip
    rows = []
    for model in MODELS:
        for n in MACS:
            for kind in model.kinds:
                rows += [_times(model, n, kind, link) for link in LINKS]
    return table(head, rows)


def _times(model: Model, n: int, kind: str, link: Link) -> tuple[str, ...]:
    tokens = LENGTHS["128k"]
    wire = exchanges(model, kind, n) * link.latency + token_bytes(model, kind, n) / link.speed
    active = model.active * 1e9 * BITS / 8
    # Split by layers, the Macs work on a token one after the other.
    at_once = n if kind == "tensor" else 1
    full, kept = (
        (active + model.kv_bytes(entries)) / at_once / MEMORY_SPEED for entries in (tokens, BUDGET)
    )
    prompt = prompt_bytes(model, kind, n) * tokens / link.speed
    compute = 2 * model.active * 1e9 * tokens / at_once / COMPUTE
    most = max(compression_bytes(model, kind, n, tokens).values()) / link.speed
    decoded = [_ms(wire, full, kept), _ms(full), _ms(kept)]
    figures = [*decoded, _s(prompt, compute), _s(compute), _ms(most, prompt)]
    return (model.name, str(n), kind, link.name, *figures)


def _ms(seconds: float, *others: float) -> str:
    """Milliseconds, bold if they are more than any of the others."""
    text = f"{1000 * seconds:.3g} ms" if seconds >= 1e-5 else "< 0.01 ms"
    return f"**{text}**" if others and seconds > min(others) else text


def _s(seconds: float, *others: float) -> str:
    text = f"{seconds:.3g} s"
    return f"**{text}**" if others and seconds > min(others) else text


def tables() -> dict[str, list[str]]:
    """By name, the tables of the page, as Markdown lines."""
    return {"memory": memory_table(), "wire": wire_table(), "time": time_table()}


def filled(page: str) -> str:
    """docs/several-macs.md with its tables as they are now."""
    for name, lines in tables().items():
        page = between(page, name, lines)
    return page


if __name__ == "__main__":
    print("\n\n".join("\n".join(lines) for lines in tables().values()))
