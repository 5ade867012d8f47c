"""Small random models of mlx-lm's real classes."""

import mlx.core as mx
from mlx_lm.models import llama, qwen3_next


def make_llama(seed: int = 0, **changes):
    mx.random.seed(seed)
    settings = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
    }
    model = llama.Model(llama.ModelArgs(**settings | changes))
    mx.eval(model.parameters())
    return model


def make_qwen(seed: int = 0, head_dim: int = 16, num_experts: int = 4):
    mx.random.seed(seed)
    model = qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=64,
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            num_experts=num_experts,
            num_experts_per_tok=2,
            decoder_sparse_step=2,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[],
            moe_intermediate_size=32,
            rope_theta=10000.0,
            partial_rotary_factor=0.5,
            max_position_embeddings=4096,
            full_attention_interval=2,
        )
    )
    mx.eval(model.parameters())
    return model
