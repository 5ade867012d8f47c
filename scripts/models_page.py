"""docs/models.md, written from the table of model types."""

from __future__ import annotations

from results_page import table

from mlx_snapkv.models.table import REFUSED, SUPPORTED, refused, supported

PAGE = """# Model types

{n_supported} of mlx-lm's model types can be compressed, and {n_refused} are refused by name. \
The conformance test (`tests/models/test_conformance.py`) runs each supported type as a tiny random model: \
the recorded queries equal those of its attention call bit for bit, the votes equal those of its softmax, \
and decoding with everything kept equals mlx-lm's. \
Real checkpoints were tried of `llama` (SmolLM2) and `gemma3_text` (Gemma 3) alone; \
of `llama` and `qwen3_next` there are the embedded models.

`python scripts/write_docs.py` writes this page; `mlx-snapkv models` prints the same.

## Supported

{supported}

## What is special

- **Latent entries (MLA).** A layer stores one latent for all heads, and the positional part of one key. To a policy \
the key is both, concatenated, which a query multiplies after the head's `embed_q` and RoPE; the value is the latent. \
Every policy is then defined as usual. Statistics of queries (`expected_attention`) and projected values (`critical`) \
are exact too, but large: per layer, `n_heads` times the square of a key's size, and `n_heads` times the latent's size \
times the hidden size.
- **Layers that read others' entries.** Their queries vote together with those of the layer that owns the entries; \
every reading head has the same weight.
- **Capped logits** (gemma2). Votes come from the capped logits; `expected_attention` is refused.
- **Quantised entries** (`kv_bits`, `memory=recall:8bit`) are refused where mlx-lm's forward pass reads plain entries: \
for latents, in gemma2, plamo2 and iquestloopcoder, and in gemma4 with borrowing layers.

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
