"""A tokenizer may have more tokens than its model. Tokens outside the model's vocabulary are rejected before use."""

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_snapkv import SnapKVError, batch_generate, generate_step, prefill, stream_generate
from mlx_snapkv.completions.body import CHAT, COMPLETIONS, Defaults, parse_body
from mlx_snapkv.completions.request import Bounds, completion_request
from mlx_snapkv.models.counts import vocabulary_size

TEXT = {"prompt": "the key"}
MESSAGES = {"messages": [{"role": "user", "content": "the key"}]}
ODD = [
    (COMPLETIONS, TEXT | {"logit_bias": {"1500": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": [3, 1500]}, "prompt"),
    (CHAT, MESSAGES | {"logit_bias": {"1500": -1}}, "logit_bias"),
]


@pytest.mark.parametrize("url, body, field", ODD)
def test_token_ids_of_a_body_must_be_in_the_models_vocabulary(demo_llama, url, body, field):
    model, tokenizer = demo_llama
    assert vocabulary_size(model) == len(tokenizer) == 1536
    parsed = parse_body(url, body)
    completion_request(parsed, tokenizer, Defaults(), bounds=Bounds(vocabulary_size=1536))
    with pytest.raises(
        SnapKVError, match=f"^{field} must have token ids from 0 to 1499, got 1500$"
    ):
        completion_request(parsed, tokenizer, Defaults(), bounds=Bounds(vocabulary_size=1500))


def test_samplers_use_no_token_beyond_the_vocabulary(demo_llama):
    """Otherwise mlx-lm would write to logits that don't exist."""
    tokenizer = TokenizerWrapper(demo_llama[1]._tokenizer, eos_token_ids=[1, 1700])
    few = Bounds(vocabulary_size=1536)
    body = parse_body(
        COMPLETIONS, TEXT | {"temperature": 1, "xtc_probability": 1, "xtc_threshold": 0}
    )
    sampler = completion_request(body, tokenizer, Defaults(), seed=1, bounds=few).sampler
    assert 0 <= sampler(mx.zeros((1, 1536))).item() < 1536
    body = parse_body(COMPLETIONS, TEXT | {"temperature": 1, "top_k": 1000})
    with pytest.raises(SnapKVError, match="top_k must be less than the vocabulary's 900, got 1000"):
        completion_request(body, tokenizer, Defaults(), bounds=Bounds(vocabulary_size=900))


@pytest.mark.parametrize("token", [1536, -1])
def test_a_prompts_tokens_must_be_in_the_models_vocabulary(demo_llama, token):
    model, tokenizer = demo_llama
    prompt = mx.array([5, token, 7])
    calls = [
        lambda: generate_step(prompt, model),
        lambda: generate_step(prompt, model, snapkv="top_k=64"),
        lambda: stream_generate(model, tokenizer, prompt),
        lambda: prefill(model, prompt, sparse=True),
        lambda: batch_generate(model, tokenizer, [[5], prompt.tolist()], snapkv="top_k=64"),
    ]
    for call in calls:
        with pytest.raises(SnapKVError, match=f"token ids from 0 to 1535, .*got {token}$"):
            call()
