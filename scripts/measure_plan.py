"""The memory that `mlx-snapkv plan` counts, against the memory that is then used, on many families of models.

    python scripts/measure_plan.py                    # writes docs/plan.json and docs/plan.md

The random models are those of tests/model_configs.py, made larger.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from results_page import about, mlx_versions, shared_options, table, write, written_by

from mlx_snapkv import MemoryPlan, generate_step, plan_memory
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo import MODELS
from mlx_snapkv.engine.report import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from model_configs import CONFIGS, REFUSED_CONFIGS, make_model

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
EMBEDDED_POLICIES = (*POLICIES, "keydiff:budget=512,block=256 then snapkv:top_k=128,n_window=64")
EMBEDDED_POLICIES += ("h2o:budget=512", "snapkv:budget=adaptive:1024,min_ctx=0")
MAX_TOKENS = 8


def family(name: str):
    """A random model of a family, some tens of megabytes."""
    config = CONFIGS[name] if name in CONFIGS else REFUSED_CONFIGS[name]
    return make_model(name, {**LARGER, **config})


def used(model, plan: MemoryPlan, tries: int = 2, **options: Any) -> int:
    """The most bytes that a model has in use while a prompt is answered as planned, of some tries."""
    mx.eval(model.parameters())
    found = []
    for _ in range(tries):
        gc.collect()
        mx.clear_cache()
        others = mx.get_active_memory() - plan.weights
        mx.reset_peak_memory()
        prompt = mx.random.randint(1, 60, (plan.context,))
        for _ in generate_step(prompt, model, policy=plan.policy, **options):
            pass
        found.append(mx.get_peak_memory() - others)
    return max(found)


def compared(
    name: str, model, n_prompt: int, policy: str | None, step: int, bits: int | None = None
) -> dict[str, Any]:
    """A row: what was planned, and what was used."""
    options = {"max_tokens": MAX_TOKENS, "prefill_step_size": step}
    options |= {} if bits is None else {"kv_bits": bits}
    plan = plan_memory(model, n_prompt, policy, **options)
    row = {"model": name, "tokens": n_prompt, "policy": policy, "bits": bits, "step": step}
    return row | {
        "weights": plan.weights,
        "planned": plan.peak,
        "used": used(model, plan, **options),
    }


def measure(names: list[str]) -> list[dict[str, Any]]:
    """All rows, of embedded models and of families."""
    rows = []
    for name in names:
        if name in MODELS:
            model, _ = load_model(name)
            n = 1500 if name == "demo-qwen3-next" else 6000
            cases = [(policy, 512, None) for policy in (None, *EMBEDDED_POLICIES)]
            cases += [(None, 512, 8), (POLICIES[1], 512, 4)]
        else:
            model, n = family(name), 1100
            policies = (None,) if name in REFUSED_CONFIGS else (None, *POLICIES)
            cases = [(policy, 512, None) for policy in policies] + [(None, 2048, None)]
        for policy, step, bits in cases:
            rows.append(compared(name, model, n, policy, step, bits))
            print(rows[-1], flush=True)
    return rows


def page(result: dict[str, Any]) -> str:
    """docs/plan.md, from its result."""
    rows = [
        (
            f"`{row['model']}`",
            f"{row['tokens']:,}",
            str(row["step"]),
            (f"`{row['policy']}`" if row["policy"] else "full cache")
            + (f", {row['bits']} bits" if row["bits"] else ""),
            format_bytes(row["weights"]),
            format_bytes(row["planned"]),
            format_bytes(row["used"]),
            f"{row['planned'] / row['used'] - 1:+.1%}",
        )
        for row in result["rows"]
    ]
    head = ("model", "tokens", "chunk", "policy", "weights", "planned", "used", "difference")
    worst = max(abs(row["planned"] / row["used"] - 1) for row in result["rows"])
    text = TEXT.format(written_by=written_by(result), worst=f"{worst:.1%}")
    return text + "\n" + "\n".join(table(head, rows)) + "\n"


TEXT = """# Planning memory

`mlx-snapkv plan --model MODEL` tells what prompts of 4k to 1M tokens will take, before a single weight is loaded,
which policy would make them fit this machine, or another Mac (`--memory 16GB`), and the command to paste. `--context
128k` asks for one length. In Python it is `plan_memory(model, context, policy)`.

{written_by}

## What is counted

The model is built by mlx-lm's own loader from `config.json` and the headers of its weights, which stay on the disk or
the hub. Nothing is guessed from names in a configuration: hybrids, sliding windows, MLA latents, mixtures and
quantised weights are what mlx-lm makes of them. Then the last chunks of the prompt are given to the model with the
very caches that the policy reads with, and MLX's own graph of all operations is taken, not computed: it is played
through by the rules by which MLX evaluates graphs.

- **weights**: all parameters, as they will lie in memory.
- **KV cache**: the entries once the prompt has been read and, by the policy, compressed. mlx-lm quantises full caches
  from 5,000 tokens on; a policy's entries are quantised when they are chosen.
- **reading**: the most in use at once until then: weights, the caches as they grow, the queries that vote, and what
  the operations make. MLX gives an operation's memory up when it has been computed, but hands operations to the
  device about a hundred tasks ahead: what all these make is held at once.
- **answering**: the same for one token of the answer, with full caches where they grow next; not what a policy needs
  for a moment to choose among the answer's own entries.
- **fits**: whether the larger of the two is within what the machine gives to models; `taken` is the
  policy asked for, if it fits, or else, of those that do, the best for the answer; the command at the end does that. Of
  more tokens than the model was trained to read, that is one that brings them nearer (`--far`), if it fits.

## What it depends on

The figures are for the device that the command runs on. **What follows was measured on MLX's CPU backend**, whose
attention holds the scores of a whole chunk: heads x chunk x context x 4 bytes, by far the most at long contexts. On a
Mac's GPU MLX's fused kernel holds no scores for the usual head sizes; there the graph has that kernel in it, and
reading takes much less. How far Metal runs ahead is taken from MLX's sources and was not measured. `--memory` changes
the machine's memory and not the device: on Linux, `plan` says what the CPU backend would need.

Of a Mac's memory its GPU may use what Metal recommends: on this machine it is asked, and for `--memory` two thirds
are counted up to 36 GiB, and three quarters above.

Not counted: what loading a model takes for a moment, tokenizers, the prompt store of a server, and several requests
at once (`--max-kv-bytes`). Where linear layers are a loop over the tokens for want of a kernel, which is the CPU
backend's way, long chunks are counted from shorter ones, and lengths between three of the table on straight lines.
`kvzip`, which reads a prompt twice, can't be planned; `dbrx` chooses experts in Python and is counted too low.

`generate`, `chat` (for documents), `cache-prompt` and `serve` ask the same function before they read, and say in one
sentence on stderr, or in the server's log, if a prompt will not fit, and what would. They never refuse: it may swap.

## Planned and used

The most bytes in use, by `mx.get_peak_memory`, for a prompt and an answer of 8 tokens; the largest difference is
{worst}. Random models have mlx-lm's classes and float32 weights.
"""


def main() -> None:
    parser = shared_options(__doc__, "plan")
    parser.set_defaults(models=[*MODELS, *FAMILIES])
    args = parser.parse_args()
    result = {
        **about("measure_plan.py", *sys.argv[1:]),
        "versions": mlx_versions(),
        "rows": measure(args.models),
    }
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
