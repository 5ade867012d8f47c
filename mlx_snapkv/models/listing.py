"""The supported and the refused model types, as `mlx-snapkv models` and the docs show them."""

from mlx_lm.utils import MODEL_REMAPPING

from . import table

PAGE = """# Model types

{n_supported} model types of mlx-lm can be compressed, and {n_refused} are refused by name. \
Each of the first is run by the conformance test (`tests/models/test_conformance.py`) as a tiny random model: \
the recorded queries are bit for bit those of its attention call, the votes are those of its softmax, \
and decoding with everything kept equals mlx-lm's. \
No published checkpoint was available to try any of them on; of `llama` and `qwen3_next` there are the embedded models.

This page is written by `python scripts/write_docs.py`; `mlx-snapkv models` prints the same.

## Supported

{supported}

## What is special

- **Latent entries (MLA).** A layer stores one latent for all heads, and the positional part of one key. To a policy \
the key is both side by side, which is what a query multiplies once it has been through the head's `embed_q` and \
RoPE; the value is the latent. Every policy is then defined as elsewhere. Statistics of queries \
(`expected_attention`) and projected values (`critical`) are exact too, but large: per layer, `n_heads` times the \
square of a key's size, and `n_heads` times the latent's size times the hidden size.
- **Layers that read others' entries.** Their queries vote beside those of the layer that owns the entries, each \
reading head as much as any other.
- **Capped logits** (gemma2). Votes are of the capped ones; `expected_attention` is refused.
- **Fewer bits** (`kv_bits`, `memory=recall:8bit`) are refused where mlx-lm's forward pass reads plain entries: with \
latents, in gemma2, plamo2 and iquestloopcoder, and in gemma4 with borrowing layers.

## Refused

{refused}
"""


def supported() -> list[tuple[str, str, str]]:
    """Model type, the other `model_type`s that mlx-lm loads with it, and a note."""
    return [
        (name, _aliases(name), "; ".join(filter(None, dict.fromkeys(f.note for f in families))))
        for name, families in table.SUPPORTED.items()
    ]


def refused() -> list[tuple[str, str, str]]:
    """Model type, the other `model_type`s that mlx-lm loads with it, and why it can't be compressed."""
    return [(name, _aliases(name), reason) for name, reason in sorted(table.REFUSED.items())]


def markdown() -> str:
    """Both lists as a page of the docs."""
    return PAGE.format(
        n_supported=len(table.SUPPORTED),
        n_refused=len(table.REFUSED),
        supported=_table(("model type", "also loads", "note"), supported()),
        refused=_table(("model type", "also loads", "why"), refused()),
    )


def _aliases(name: str) -> str:
    return ", ".join(sorted(alias for alias, target in MODEL_REMAPPING.items() if target == name))


def _table(header: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    ruled = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled)
