"""Record which entries kvpress' presses keep on the built-in LLaMA, in `tests/fixtures/kvpress.npz`.

Run the script in its own environment, because kvpress needs other versions of torch and transformers:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.5
    /tmp/kvpress/bin/python scripts/record_kvpress.py

The file contains the token ids, the kept positions (sorted, by layer and KV head) and the scores at the compression.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "mlx_snapkv" / "demo" / "models" / "llama"
OUT = ROOT / "tests" / "fixtures" / "kvpress.npz"
TEXT = ROOT / "tests" / "fixtures" / "kvpress_prompt.txt"


# policy/case -> press, its options, entries kept
CASES = {
    "snapkv/window32_kernel5": (SnapKVPress, {"window_size": 32, "kernel_size": 5}, 96),
    "snapkv/window16_kernel13": (SnapKVPress, {"window_size": 16, "kernel_size": 13}, 64),
    "snapkv/window8_kernel1": (SnapKVPress, {"window_size": 8, "kernel_size": 1}, 40),
    "expected_attention/24": (ExpectedAttentionPress, {}, 24),
    "expected_attention/200": (ExpectedAttentionPress, {}, 200),
    "lagkv/128": (LagKVPress, {"lag_size": 128}, 400),
    "lagkv/32": (LagKVPress, {"lag_size": 32}, 200),
}
for kept in (24, 96):
    CASES |= {
        f"keydiff/{kept}": (KeyDiffPress, {}, kept),
        f"key_norm/{kept}": (KnormPress, {}, kept),
        f"tova/{kept}": (TOVAPress, {}, kept),
        f"streaming_llm/{kept}": (StreamingLLMPress, {}, kept),
    }


def recording(press):
    """Patch a press to record its scores. Return the press, and a dict of the scores by layer."""
    recorded = {}
    score = press.score

    def recording_score(module, *args, **kwargs):
        scores = score(module, *args, **kwargs)
        recorded[module.layer_idx] = scores[0].float().numpy().copy()
        return scores

    press.score = recording_score
    return press, recorded


def main() -> None:
    """Read the text with each press, and write positions, scores and options."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokens = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids
    T = tokens.shape[1]
    arrays = {
        "tokens": tokens[0].numpy(),
        "versions": np.array([version("kvpress"), version("transformers")]),
    }
    for name, (press_class, options, kept) in CASES.items():
        # kvpress keeps int(T * (1 - ratio)) entries; the extra half keeps rounding from losing one.
        press, recorded = recording(press_class(compression_ratio=1 - (kept + 0.5) / T, **options))
        with torch.no_grad(), press(model):
            model(tokens)
        scores = np.stack([recorded[layer] for layer in sorted(recorded)])
        best = np.argsort(-scores, axis=-1, kind="stable")[..., :kept]
        arrays[f"{name}/positions"] = np.sort(best, axis=-1).astype(np.uint16)
        arrays[f"{name}/scores"] = scores.astype(np.float32)
        arrays[f"{name}/settings"] = np.array([*options.values(), kept])
    np.savez_compressed(OUT, **arrays)
    print(f"{T} tokens, {OUT.stat().st_size} bytes: {OUT}")


if __name__ == "__main__":
    main()
