"""Models for the tests: the embedded ones through mlx-lm's loader, and small random ones of the real classes."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models import llama, qwen3_next

from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack, question_prompt


def _load(name: str):
    model, tokenizer = load(str(MODELS[name]))
    model.set_dtype(mx.float32)  # what a CPU computes quickly
    return model, tokenizer


@pytest.fixture(scope="session")
def demo_llama():
    return _load("demo")


@pytest.fixture(scope="session")
def demo_qwen():
    return _load("demo-qwen3-next")


@pytest.fixture(scope="session", params=list(MODELS))
def demo_model(request):
    """Each embedded model in turn, as (model, tokenizer)."""
    return request.getfixturevalue("demo_llama" if request.param == "demo" else "demo_qwen")


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


def make_qwen(seed: int = 0):
    mx.random.seed(seed)
    model = qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            vocab_size=64,
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            num_experts=4,
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


@pytest.fixture(params=["llama", "qwen3_next"])
def tiny_model(request):
    """A random model of each supported family; the Qwen3-Next has linear layers and experts."""
    return make_llama() if request.param == "llama" else make_qwen()


@pytest.fixture
def tokens():
    """200 token ids below 64."""
    rng = random.Random(0)
    return mx.array([rng.randrange(64) for _ in range(200)])


@pytest.fixture(scope="session")
def ask():
    """ask(tokenizer, n_tokens, seed) -> (prompt ids, fact): one question at the end of a fresh document."""

    def make(tokenizer, n_tokens: int, seed: int, n_facts: int = 4):
        document, facts = make_haystack(tokenizer, random.Random(seed), n_facts, n_tokens)
        return question_prompt(tokenizer, document, facts[0].question), facts[0]

    return make
