"""Every policy on a model that one or several processes hold: what each keeps and answers, as JSON.

Run as `python cases.py FOLDER MODEL tensor|pipeline`; every rank writes FOLDER/RANK.json.
"""

import json
import random
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.utils import sharded_load

from mlx_snapkv import generate_step, prefill
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack, question_prompt

N_TOKENS, N_ANSWER = 700, 8
ALWAYS = "n_sink=4,n_window=32,min_ctx=0"
POLICIES = {
    "snapkv": f"snapkv:budget=128,{ALWAYS}",
    "shared": f"snapkv:budget=128,{ALWAYS},heads=shared",
    "critical": f"snapkv:budget=128,{ALWAYS},critical=true",
    "mass": f"snapkv:mass=0.9,max_budget=256,{ALWAYS}",
    "pyramid": f"snapkv:budget=pyramid:128,{ALWAYS}",
    "adaptive": f"snapkv:budget=adaptive:128,{ALWAYS}",
    "keydiff": "keydiff:budget=128,block=128",
    "streaming_llm": "streaming_llm:budget=128",
    "h2o": "h2o:budget=128,block=128",
    "tova": "tova:budget=128,block=128",
    "key_norm": "key_norm:budget=128,block=128",
    "lagkv": "lagkv:budget=160,lag_size=32,block=128",
    "expected_attention": "expected_attention:budget=128,block=128",
    "scissorhands": "scissorhands:budget=128,block=128,obs_window=64",
    "kvzip": "kvzip:budget=adaptive:128",
    "random": "random:budget=128,block=128",
    "stages": f"keydiff:budget=256,block=128 then snapkv:budget=96,{ALWAYS}",
    "block_votes": f"snapkv:budget=128,{ALWAYS},schedule=block,block=128",
}  # fmt: skip
# What an answer asks of all entries, and bits.
WAYS = {
    "unsure": {"policy": POLICIES["shared"], "memory": "recall", "verify": "unsure"},
    "all": {"policy": POLICIES["snapkv"], "memory": "recall", "verify": "all"},
    "book": {"policy": POLICIES["stages"], "memory": "recall:file", "verify": "unsure"},
    "bits": {"policy": POLICIES["tova"], "kv_bits": 8},
}


def prompt_of(tokenizer) -> mx.array:
    document, facts = make_haystack(tokenizer, random.Random(5), 4, N_TOKENS)
    return mx.array(question_prompt(tokenizer, document, facts[0].question))


def kept(model, tokens: mx.array, policy: str) -> dict:
    """By number of its layer, the positions that each of the KV heads here keeps, and what the report says."""
    cache, report = prefill(model, tokens, policy)
    layers = attention_layers(model, cache)
    held = {layer.number: layer.entries_in(cache).held().positions[0].tolist() for layer in layers}
    step = mlx_generate_step(tokens[-1:], model, max_tokens=N_ANSWER, prompt_cache=cache)
    said = [int(token) for token, _ in step]
    told = [report.entries_kept, report.kv_bytes_before, report.kv_bytes_after, report.attention_share]
    return {"kept": held, "report": told, "ranks": report.ranks, "said": said}


def answered(model, tokens: mx.array, ways: dict) -> dict:
    """The answer's tokens, and what the report says."""
    reports: list = []
    step = generate_step(tokens, model, max_tokens=N_ANSWER, on_report=reports.append, **ways)
    said = [int(token) for token, _ in step]
    report = reports[0]
    return {"said": said, "report": [report.entries_kept, report.kv_bytes_after]}


def run(model, tokenizer, refused=()) -> dict:
    tokens = prompt_of(tokenizer)
    found = {name: kept(model, tokens, policy) for name, policy in POLICIES.items()}
    ways = {name: way for name, way in WAYS.items() if name not in refused}
    return found | {name: answered(model, tokens, way) for name, way in ways.items()}


def main(folder: str, name: str, kind: str) -> None:
    group = mx.distributed.init()
    path = str(MODELS[name])
    if group.size() == 1:
        model, tokenizer = load(path)
    else:
        groups = {"pipeline_group": group} if kind == "pipeline" else {"tensor_group": group}
        model, tokenizer = sharded_load(path, **groups)
    model.set_dtype(mx.float32)
    refused = ("all",) if name == "demo-qwen3-next" else ()
    Path(folder, f"{group.rank()}.json").write_text(json.dumps(run(model, tokenizer, refused)))


if __name__ == "__main__":
    main(*sys.argv[1:])
