"""A random LLaMA on which attention dominates at long contexts, even on a CPU."""

import mlx.core as mx
from mlx_lm.models import llama

NAME = "random LLaMA, float32 (4 layers, hidden size 256, 16 heads, 8 KV heads, head size 64)"


def make_random_model() -> llama.Model:
    """The model that `mlx-snapkv bench` measures when it is given none; the same for every run."""
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=256,
            num_hidden_layers=4,
            intermediate_size=512,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
            vocab_size=1024,
        )
    )
    mx.eval(model.parameters())
    return model
