"""The memory that `mlx-snapkv plan` counts, against the memory that is then used, on many families of models.

    python scripts/measure_plan.py                    # writes docs/plan.json; then: make docs

The random models are those of tests/model_configs.py, made larger. The real ones are those of `make real-models`,
where that has been run.
"""

import gc
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from results_page import Result, shared_options

from mlx_snapkv import generate_step, plan_memory
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo import MODELS
from mlx_snapkv.policies import method_named

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from model_configs import CONFIGS, REFUSED_CONFIGS, make_model
from real_models import FOLDER
from real_models import MODELS as REAL

FAMILIES = """llama qwen3_moe gemma3_text gpt_oss phi3 gpt_neox cohere2 granitemoehybrid nemotron_h falcon_h1
baichuan_m1 deepseek_v3""".split()
LARGER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "mamba_d_ssm"), 256),
    **dict.fromkeys(("intermediate_size", "n_inner"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head", "mamba_n_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("head_dim", "mamba_d_head", "qk_nope_head_dim", "v_head_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 256),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 64),
    "vocab_size": 4096,
    "sliding_window": 128,
}
POLICIES = ("keydiff:budget=256,block=128", "snapkv:top_k=128,n_window=64,min_ctx=0")
EMBEDDED_POLICIES = (
    *POLICIES,
    "keydiff:budget=512,block=256 then snapkv:top_k=128,n_window=64",
    "h2o:budget=512",
)
MAX_TOKENS = 8

# Models that no constant of `planning/` was chosen on: other families, sizes and weights; by name, what differs.
WIDER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "block_dim"), 384),
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "moe_intermediate_size": 192,
}
HELD_OUT: dict[str, dict[str, Any]] = {
    "olmo2": WIDER,
    "starcoder2": {**WIDER, "intermediate_size": 1536},
    "exaone4": WIDER,
    "mixtral": {**WIDER, "intermediate_size": 512},
    "lfm2": WIDER,
    "kimi_linear": {"qk_nope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 128},
    "gemma2 bfloat16": WIDER,
    "smollm3 4-bit": WIDER,
}


def model_named(name: str):
    """An embedded, a random or a real model: of a random one's name, the first word is its family."""
    if name in MODELS or name in REAL:
        return load_model(str(FOLDER / name) if name in REAL else name)[0]
    family, *kind = name.split()
    config = CONFIGS[family] if family in CONFIGS else REFUSED_CONFIGS[family]
    model = make_model(family, {**LARGER, **config, **HELD_OUT.get(name, {})})
    if "bfloat16" in kind:
        model.set_dtype(mx.bfloat16)
    if "4-bit" in kind:
        nn.quantize(model, group_size=64, bits=4)
    return model


Case = tuple[int, str | None, int, int | None]  # tokens, policy, chunk, bits


def cases(name: str) -> list[Case]:
    if name in MODELS:
        n = 1500 if name == "demo-qwen3-next" else 6000
        policies = [(n, policy, 512, None) for policy in (None, *EMBEDDED_POLICIES)]
        return [*policies, (n, None, 512, 8), (n, POLICIES[1], 512, 4)]
    if name in REAL:
        block = "keydiff:budget=2048,block=512"
        return [(2048, None, 2048, None), (2048, None, 512, None), (8192, block, 512, None)]
    policies = (None,) if name in REFUSED_CONFIGS else (None, *POLICIES)
    return [*((1100, policy, 512, None) for policy in policies), (1100, None, 2048, None)]


def measure(model, case: Case) -> dict[str, Any]:
    """What was planned, and the most bytes that a model had in use while it answered as planned."""
    n, policy, step, bits = case
    options = {"max_tokens": MAX_TOKENS, "prefill_step_size": step}
    options |= {} if bits is None else {"kv_bits": bits}
    method: Any = policy and method_named(policy)
    plan = plan_memory(model, n, method, **options)
    mx.eval(model.parameters())
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory() - plan.weights
    mx.reset_peak_memory()
    for _ in generate_step(mx.random.randint(1, 60, (n,)), model, policy=method, **options):
        pass
    used = mx.get_peak_memory() - others
    row = {"tokens": n, "policy": policy, "bits": bits, "step": step, "weights": plan.weights}
    return row | {"planned": plan.peak, "used": used}


def main() -> None:
    parser = shared_options(__doc__, "plan")
    real = [name for name in REAL if (FOLDER / name).is_dir()]
    parser.set_defaults(models=[*MODELS, *FAMILIES, *HELD_OUT, *real])
    args = parser.parse_args()
    result = Result(args.out)
    for name in args.models:
        model = model_named(name)
        for case in cases(name):
            result.add({"model": name, **measure(model, case)})


if __name__ == "__main__":
    main()
