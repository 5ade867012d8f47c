"""The two embedded architectures as Hugging Face models, and their export to mlx-lm folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from .tokenizer import BOS, CHAT_TEMPLATE, END

COMMON = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA = COMMON | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "mlp_bias": False,
}
QWEN3_NEXT = COMMON | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
    "moe_intermediate_size": 0,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CONFIGS = {"llama": LLAMA, "qwen3-next": QWEN3_NEXT}


def build(arch: str, vocab_size: int) -> torch.nn.Module:
    settings = CONFIGS[arch] | {"vocab_size": vocab_size, "use_cache": False}
    for key in ("model_type", "architectures"):
        settings.pop(key)
    if arch == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        settings["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": settings.pop("rope_theta"),
        }
        return LlamaForCausalLM(LlamaConfig(**settings))
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    interval = settings.pop("full_attention_interval")
    settings["layer_types"] = [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(settings["num_hidden_layers"])
    ]
    settings["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": settings.pop("rope_theta"),
        "partial_rotary_factor": settings.pop("partial_rotary_factor"),
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**settings))


def to_mlx_weights(arch: str, state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The checkpoint as mlx-lm keeps it: tied head dropped, Qwen3-Next's norms plus one, convolution transposed."""
    weights = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" or "rotary_emb" in name:
            continue
        value = tensor.detach().float()
        if arch == "qwen3-next":
            if name.endswith("conv1d.weight"):
                value = value.transpose(1, 2)
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                value = value + 1.0
        weights[name] = np.ascontiguousarray(value.numpy().astype(np.float16))
    return weights


def export(arch: str, model: torch.nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        to_mlx_weights(arch, model.state_dict()),
        folder / "model.safetensors",
        metadata={"format": "mlx"},
    )
    config = CONFIGS[arch] | {"vocab_size": tokenizer.get_vocab_size(), "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIGS[arch]["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
