"""A model folder of an 8B's size whose weights are random: for speed and memory, not for answers.

python scripts/make_random_model.py build/random-8b
mlx-snapkv bench --model build/random-8b --output build/benchmarks-8b
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_snapkv.demo import MODELS

# A LLaMA 3's of 8 billion parameters.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    for path in MODELS["demo"].glob("tokenizer*"):  # any will do
        shutil.copy(path, args.folder)
    (args.folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(
        str(args.folder / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )


if __name__ == "__main__":
    main()
