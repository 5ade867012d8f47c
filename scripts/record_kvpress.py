"""Record what kvpress' SnapKVPress keeps on the embedded LLaMA: `tests/fixtures/kvpress_snapkv.npz`.

Run in an environment of its own, since kvpress wants a torch and transformers of its own:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress
    /tmp/kvpress/bin/python scripts/record_kvpress.py

Only token ids, the kept positions (sorted, by layer and KV head) and the scores at the cut are stored.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from kvpress import SnapKVPress
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "mlx_snapkv" / "demo" / "models" / "llama"
OUT = ROOT / "tests" / "fixtures" / "kvpress_snapkv.npz"
TEXT = ROOT / "tests" / "fixtures" / "kvpress_prompt.txt"

# name: (window, kernel, rows kept)
CASES = {
    "window32_kernel5": (32, 5, 96),
    "window16_kernel13": (16, 13, 64),
    "window8_kernel1": (8, 1, 40),
}


class RecordingPress(SnapKVPress):
    """Keeps each layer's scores as SnapKVPress computes them."""

    def score(self, module, *args, **kwargs):
        scores = super().score(module, *args, **kwargs)
        self.recorded[module.layer_idx] = scores[0].float().numpy()
        return scores


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokens = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids
    T = tokens.shape[1]
    arrays = {
        "tokens": tokens[0].numpy(),
        "versions": np.array([version("kvpress"), version("transformers")]),
    }
    for name, (window, kernel, kept) in CASES.items():
        # kvpress keeps int(T * (1 - ratio)) rows; half a row keeps rounding from losing one.
        press = RecordingPress(
            compression_ratio=1 - (kept + 0.5) / T, window_size=window, kernel_size=kernel
        )
        press.recorded = {}
        with torch.no_grad(), press(model):
            model(tokens)
        scores = np.stack([press.recorded[layer] for layer in sorted(press.recorded)])
        best = np.argsort(-scores, axis=-1, kind="stable")[..., :kept]
        arrays[f"{name}/positions"] = np.sort(best, axis=-1).astype(np.uint16)
        arrays[f"{name}/scores"] = scores.astype(np.float32)
        arrays[f"{name}/settings"] = np.array([window, kernel, kept])
    np.savez_compressed(OUT, **arrays)
    print(f"{T} tokens, {OUT.stat().st_size} bytes: {OUT}")


if __name__ == "__main__":
    main()
