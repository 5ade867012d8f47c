"""How many entries a chunk can read at little cost, compared with the model's other matrix products."""

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model
from tiny_models import make_llama

from mlx_snapkv import Sparse
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.products import entries_costing
from mlx_snapkv.planning.request_plan import plan_request

HIDDEN, HEADS, KV_HEADS, SIZE = 64, 4, 2, 32
PROJECTIONS = HIDDEN * SIZE * (2 * HEADS + 2 * KV_HEADS)
PER_ENTRY = PROJECTIONS / HIDDEN
SHAPE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
}


def found(model, share):
    return entries_costing(share, model, attention_layers(model, make_prompt_cache(model)))


def test_projections_and_mlp_are_counted():
    model = make_llama(**SHAPE, intermediate_size=992)
    wanted = (PROJECTIONS + 3 * HIDDEN * 992) / PER_ENTRY
    assert found(model, 1) == int(wanted) and found(model, 0.25) == int(wanted / 4)
    nn.quantize(model, group_size=32, bits=4)
    assert found(model, 1) == int(wanted)


def test_only_the_experts_of_a_token_are_counted():
    config = {**SHAPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    model = make_model("qwen3_moe", config)
    experts = 2 * 3 * HIDDEN * 96 + 8 * HIDDEN  # two experts, and the router
    assert found(model, 1) == int((PROJECTIONS + experts) / PER_ENTRY)


@pytest.mark.parametrize("width, given, wanted", [
    (12000, {}, 1504), (12000, {"read_top_k": 512}, 512), (64, {}, 1024), (64, {"read_top_k": "12.5%"}, 992),
])  # fmt: skip
def test_a_model_with_wide_layers_chooses_more_by_default(width, given, wanted):
    model = make_llama(**SHAPE, intermediate_size=width)
    sparse = Sparse(read="sparse", **given)
    plan = plan_request(model, CompressionConfig(sparse), 8000)
    assert plan.sparse_reading.reach.n_chosen == wanted
