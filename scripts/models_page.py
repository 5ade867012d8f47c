"""docs/models.md, written from the table of model types."""

from __future__ import annotations

from results_page import table

from mlx_snapkv.models.table import REFUSED, SUPPORTED, refused, supported

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


def page() -> str:
    """docs/models.md."""
    return PAGE.format(
        n_supported=len(SUPPORTED),
        n_refused=len(REFUSED),
        supported="\n".join(table(("model type", "also loads", "note"), supported())),
        refused="\n".join(table(("model type", "also loads", "why"), refused())),
    )
