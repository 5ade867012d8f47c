"""Tiny random models of mlx-lm's model types, each described by what differs from one base configuration."""

from __future__ import annotations

import copy
import importlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear

WINDOW = 8
LAYERS = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LINEAR = {
    "full_attn_layers": [2, 4],
    "kda_layers": [1, 3],
    "head_dim": 32,
    "num_heads": 2,
    "short_conv_kernel_size": 4,
}
LLAMA4_ROPE = {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}


def _each(value, names: str) -> dict:
    return dict.fromkeys(names.split(), value)


BASE = {
    **_each(64, "hidden_size intermediate_size mamba_d_ssm dim_model_base n_embd n_inner"),
    **_each(
        4,
        "num_hidden_layers num_attention_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts linear_conv_kernel_dim conv_kernel mamba_n_heads mamba_num_heads "
        "mamba_d_conv n_head n_layer",
    ),
    **_each(
        2,
        "num_key_value_heads num_experts_per_tok moe_topk moe_top_k moe_k linear_num_key_heads "
        "linear_num_value_heads full_attention_interval",
    ),
    **_each(16, "head_dim kv_lora_rank q_lora_rank mamba_d_head mamba_head_dim"),
    **_each(4096, "max_position_embeddings n_positions n_ctx"),
    **_each(
        False,
        "tie_word_embeddings post_norm use_bias use_qkv_bias attention_bias mlp_bias conv_bias "
        "mamba_proj_bias",
    ),
    **_each(8, "rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    **_each(
        1e-5,
        "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon post_norm_eps",
    ),
    **_each(True, "use_qk_norm qk_norm use_conv_bias norm_topk_prob mamba_conv_bias"),
    **_each(
        1.0,
        "output_multiplier routed_scaling_factor logits_scaling embedding_multiplier "
        "residual_multiplier scale_emb",
    ),
    **_each(
        1,
        "num_shared_experts n_shared_experts num_shared_expert first_k_dense_replace "
        "num_dense_layers decoder_sparse_step n_group topk_group mamba_expand mamba_n_groups "
        "n_groups",
    ),
    **_each(
        32,
        "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size "
        "share_expert_dim linear_key_head_dim linear_value_head_dim mamba_d_state "
        "ssm_state_size",
    ),
    "vocab_size": 128,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "mlp_only_layers": [],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "conv_L_cache": 3,
    "attention_multiplier": 0.25,
    "scale_depth": 1.4,
}

# Types for which BASE is enough.
PLAIN = """
apertus bailing_moe bitnet cohere deepseek deepseek_v3 dots1 ernie4_5 ernie4_5_moe falcon_h1 gemma glm glm4
glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_oss gptj granite granitemoe helium hunyuan_v1_dense internlm2
internlm3 Klear llama mimo minicpm minimax mixtral nanochat olmo2 olmoe phi phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 talkie
telechat3 youtu_llm
"""

# What differs from BASE. A text_config adds to BASE too, or names the type whose configuration it is.
CONFIGS: dict[str, dict] = {
    **_each({}, PLAIN),
    "afmoe": {"layer_types": LAYERS},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {
        "layer_group_size": 2,
        "head_dim": 32,
        "moe_shared_expert_intermediate_size": 32,
        "short_conv_kernel_size": 4,
        "rope_scaling": YARN,
    },
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 2048}},
    "exaone": {"num_layers": 4},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": LAYERS, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", "full_attention", *LAYERS[2:]]},
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16.0},
    "gemma3": {"text_config": "gemma3_text"},
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gemma3n": {
        "text_config": {
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 4,
            "layer_types": LAYERS * 2,
            "vocab_size_per_layer_input": 128,
            "rope_local_base_freq": 100.0,
            "activation_sparsity_pattern": [0.5] * 4 + [0.0] * 4,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text_config": "gemma4_text"},
    "gemma4_text": {
        "num_hidden_layers": 7,
        "num_kv_shared_layers": 3,
        "layer_types": [*LAYERS, "full_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
    },
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_cla": False,
        "cla_share_factor": 1,
        "use_mixed_mlp_moe": True,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 10.0},
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text_config": "deepseek_v3"},
    "kimi_k3": {
        "text_config": {
            "linear_attn_config": LINEAR,
            "hidden_act": "situ",
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "num_experts_per_token": 2,
        }
    },
    "kimi_linear": {"linear_attn_config": LINEAR, "model_max_length": 4096},
    "kimi_vl": {"text_config": "deepseek_v3"},
    "laguna": {"layer_types": LAYERS},
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2-vl": {"text_config": "lfm2"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "use_expert_bias": True},
    "lille-130m": {"block_size": 4096, "n_kv_heads": 2},
    "llama4": {
        "text_config": {
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "num_experts_per_tok": 1,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 64, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "zero_expert_num": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mellum": {"layer_types": LAYERS, "rope_parameters": dict.fromkeys(LAYERS, ROPE)},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": True,
        "sliding_window_size": WINDOW,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
    },
    "minicpm3": {"rope_scaling": {"rope_type": "longrope"}},
    "ministral3": {"layer_types": LAYERS, "rope_parameters": LLAMA4_ROPE},
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": LLAMA4_ROPE}},
    "mistral4": {"rope_parameters": LLAMA4_ROPE | {"mscale_all_dim": 1.0, "factor": 1.0}},
    "muse_glimmer": {"layer_types": LAYERS},
    "nanbeige": {"num_hidden_layers": 2, "num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": "M*-E*"},
    "olmo3": {"layer_types": LAYERS},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0] * 4,
    },
    "phixtral": {"num_vocab": 128, "model_dim": 64, "num_heads": 4, "num_layers": 4},
    "pixtral": {"text_config": "llama"},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "tie_word_embeddings": True,
    },
    # Its mask is one row wider than its sliding cache: past a full window, chunks change its results.
    "plamo3": {"sliding_window_pattern": 2, "sliding_window": 4096},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": f"model.layers.1.{path}",
                "block": block,
                "embedding": False,
                "dtype": "float16",
            }
            for path, block in [("self_attn.q_proj", 0), ("mlp.down_proj", 512)]
        ],
        "text_config": {"num_experts": 0, "hidden_size": 128, "intermediate_size": 512},
    },
    "qwen": {"kv_channels": 16},
    "qwen2_vl": {"text_config": "qwen2"},
    "qwen3_5": {"text_config": {"num_experts": 0}},
    "qwen3_5_moe": {"text_config": {}},
    "qwen3_vl": {"text_config": "qwen3"},
    "qwen3_vl_moe": {"text_config": "qwen3_moe"},
    "spark2_5": {"layer_types": LAYERS, "rope_parameters": dict.fromkeys(LAYERS, ROPE)},
    "step3p5": {"num_attention_groups": 2},
}

# Types, or variants of a supported type, that can't be compressed.
REFUSED_CONFIGS: dict[str, dict] = {
    "deepseek_v32": {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 2048},
    "gear": {**CONFIGS["gear"], "attn_logit_softcapping": 50.0},
    "mamba2": {
        "num_heads": 4,
        "state_size": 32,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "phi3small": {
        "vocab_size": 100352,  # it writes to the logits of its own tokenizer's ids
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 64,
        "gegelu_limit": 20.0,
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"] * 2,
    },
}


def config(model_type: str) -> dict:
    """The whole configuration of a type in CONFIGS."""
    return _complete(model_type, CONFIGS[model_type])


def make_model(model_type: str, config: dict | None = None):
    """A random float32 model of mlx-lm's class, of CONFIGS or of another `config` that adds to BASE."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    args = _complete(model_type, CONFIGS[model_type] if config is None else config)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(args))
    for name, child in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if isinstance(child, BitLinear):  # its kernel is Metal's
            linear = nn.Linear(child.in_features, child.out_features, bias=False)
            model.update_modules(tree_unflatten([(name, linear)]))
    model.update(tree_map_with_path(_randomise, model.parameters()))
    mx.eval(model.parameters())
    return model.eval()


def _complete(model_type: str, changes: dict) -> dict:
    text = changes.get("text_config")
    if isinstance(text, str):
        changes = {**changes, "text_config": config(text)}
    elif text is not None:
        text = {**BASE, "model_type": f"{model_type}_text", **text}
        changes = {**changes, "text_config": text}
    # mlx-lm changes some of what it is given.
    return copy.deepcopy({**BASE, "model_type": model_type, **changes})


def _randomise(path: str, x: mx.array) -> mx.array:
    """float32, and random where it only waits to be loaded: sinks, and what is all zeros."""
    if "sink" in path:
        return mx.random.normal(x.shape)
    zeros = not mx.any(x).item()
    if x.dtype == mx.uint32:  # packed weights
        return mx.random.randint(0, 2**31 - 1, x.shape).astype(x.dtype) if zeros else x
    return 0.5 * mx.random.normal(x.shape) if zeros else x.astype(mx.float32)
