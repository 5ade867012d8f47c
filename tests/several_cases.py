"""Every policy on a model that one or several processes hold: what each keeps and answers, as JSON.

Run as `python several_cases.py FOLDER MODEL tensor|pipeline`, every rank writes FOLDER/RANK.json. It loads
FOLDER/one-NAME.safetensors, which one process saved, and saves FOLDER/two-NAME.safetensors itself.
"""

import json
import random
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.utils import sharded_load

from mlx_snapkv import generate_step, prefill, saved
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack, question_prompt

N_TOKENS, N_ANSWER = 450, 6
ALWAYS = "n_sink=4,n_window=32,lookahead=4"
POLICIES = {
    "snapkv": f"snapkv:budget=96,{ALWAYS}",
    "shared": f"snapkv:budget=96,{ALWAYS},heads=shared",
    "critical": f"snapkv:budget=96,{ALWAYS},critical=true",
    "mass": f"snapkv:mass=0.9,max_budget=160,{ALWAYS}",
    "pyramid": f"snapkv:budget=pyramid:96,{ALWAYS}",
    "adaptive": f"snapkv:budget=adaptive:96,{ALWAYS}",
    "keydiff": "keydiff:budget=96,block=96",
    "streaming_llm": "streaming_llm:budget=96",
    "h2o": "h2o:budget=96,block=96",
    "tova": "tova:budget=96,block=96",
    "key_norm": "key_norm:budget=96,block=96",
    "lagkv": "lagkv:budget=128,lag_size=24,block=96",
    "expected_attention": "expected_attention:budget=96,block=96",
    "scissorhands": "scissorhands:budget=96,block=96,obs_window=64",
    "kvzip": "kvzip:budget=adaptive:96",
    "random": "random:budget=96,block=96",
    "stages": "keydiff:budget=192,block=96 then snapkv:budget=80,n_sink=4,n_window=32",
    "block_votes": f"snapkv:budget=96,{ALWAYS},schedule=block,block=96",
}  # fmt: skip
# What an answer asks of all entries, and bits.
WAYS = {
    "unsure": {"policy": POLICIES["shared"], "memory": "recall", "verify": "unsure"},
    "all": {"policy": POLICIES["snapkv"], "memory": "recall", "verify": "all"},
    "file": {"policy": POLICIES["snapkv"], "memory": "recall:file", "verify": "unsure"},
    "book": {"policy": POLICIES["stages"], "memory": "recall:file", "verify": "unsure"},
    "bits": {"policy": POLICIES["tova"], "kv_bits": 8},
}

SAVED = ("tova", "pyramid")


def prompt_of(tokenizer) -> mx.array:
    document, facts = make_haystack(tokenizer, random.Random(5), 4, N_TOKENS)
    return mx.array(question_prompt(tokenizer, document, facts[0].question))


def held(model, cache: list) -> dict:
    """By number of its layer, the positions of each of the KV heads here."""
    layers = attention_layers(model, cache)
    return {
        str(layer.number): layer.entries_in(cache).held().positions[0].tolist() for layer in layers
    }


def continued(model, tokens: mx.array, cache: list) -> list[int]:
    step = mlx_generate_step(tokens[-1:], model, max_tokens=N_ANSWER, prompt_cache=cache)
    return [int(token) for token, _ in step]


def kept(model, tokens: mx.array, policy: str) -> dict:
    """What a policy keeps, what is answered from that, and what the report says."""
    cache, report = prefill(model, tokens[:-1], policy)
    positions = held(model, cache)
    said = continued(model, tokens, cache)
    told = [
        report.entries_kept,
        report.kv_bytes_before,
        report.kv_bytes_after,
        report.attention_share,
    ]
    return {"kept": positions, "report": told, "ranks": report.ranks, "said": said}


def answered(model, tokens: mx.array, ways: dict) -> dict:
    """The answer's tokens, and what the report says."""
    reports: list = []
    step = generate_step(tokens, model, max_tokens=N_ANSWER, on_report=reports.append, **ways)
    said = [int(token) for token, _ in step]
    report = reports[0]
    return {"said": said, "report": [report.entries_kept, report.kv_bytes_after]}


def save(model, tokens: mx.array, path: Path, policy: str) -> None:
    cache, _ = prefill(model, tokens[:-1], policy)
    saved.save(path, model, cache, tokens[:-1].tolist(), policy)


def loaded(model, tokens: mx.array, path: Path) -> dict:
    """What a file holds, and what is answered from that."""
    cache = saved.load(path, model).prompt_cache
    return {"kept": held(model, cache), "said": continued(model, tokens, cache)}


def files(model, tokens: mx.array, folder: Path) -> dict:
    found = {}
    for name in SAVED:
        save(model, tokens, folder / f"two-{name}.safetensors", POLICIES[name])
        for file in (f"one-{name}", f"two-{name}"):
            found[file] = loaded(model, tokens, folder / f"{file}.safetensors")
    return found


def run(model, tokenizer, refused=()) -> dict:
    tokens = prompt_of(tokenizer)
    found = {name: kept(model, tokens, policy) for name, policy in POLICIES.items()}
    ways = {name: way for name, way in WAYS.items() if name not in refused}
    return found | {name: answered(model, tokens, way) for name, way in ways.items()}


def main(folder: str, name: str, kind: str) -> None:
    group = mx.distributed.init()
    path = str(MODELS[name])
    model, tokenizer = sharded_load(path, **{f"{kind}_group": group})
    model.set_dtype(mx.float32)
    found = run(model, tokenizer, ("all",) if name == "demo-qwen3-next" else ())
    found |= files(model, prompt_of(tokenizer), Path(folder))
    Path(folder, f"{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
