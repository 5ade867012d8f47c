"""Write the entries that policies keep, and the answers, as JSON, for a model shared by one or several processes.

Run as `python -m several_cases FOLDER MODEL tensor|pipeline`. Every rank writes FOLDER/RANK.json.
"""

import json
import random
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import sharded_load

from mlx_snapkv import SnapKVError, generate_step, prefill, saved
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack, question_prompt

N_TOKENS, N_ANSWER = 250, 4
ALWAYS = "n_sink=4,n_window=32,lookahead=4"
POLICIES = {
    "snapkv": f"snapkv:budget=96,{ALWAYS}",
    "h2o": "h2o:budget=96,block=96",
    "stages": "keydiff:budget=192,block=96 then snapkv:budget=80,n_sink=4,n_window=32",
}
# Ways to decode an answer.
ANSWERS = {
    "snapkv": {"policy": POLICIES["snapkv"]},
    "sparse": {"sparse": "budget=96,n_window=32"},
    "bits": {"policy": POLICIES["h2o"], "kv_bits": 8},
}
TOVA = "tova:budget=96,block=96"  # refused if ranks split the heads of a layer


def prompt_of(tokenizer) -> mx.array:
    document, facts = make_haystack(tokenizer, random.Random(5), 4, N_TOKENS)
    return mx.array(question_prompt(tokenizer, document, facts[0].question))


def kept(model, tokens: mx.array, policy: str) -> dict:
    """Return the positions kept by each of this process's KV heads, per layer, and the tokens of the answer."""
    cache, report = prefill(model, tokens[:-1], policy)
    layers = attention_layers(model, cache)
    positions = [layer.layer_cache_in(cache).held().positions[0].tolist() for layer in layers]
    steps = mlx_generate_step(tokens[-1:], model, max_tokens=N_ANSWER, prompt_cache=cache)
    said = [int(token) for token, _ in steps]
    return {"kept": positions, "kv_bytes": report.kv_bytes_after, "said": said}


def run(model, tokenizer) -> dict:
    tokens = prompt_of(tokenizer)
    found: dict = {name: kept(model, tokens, policy) for name, policy in POLICIES.items()}
    for name in ANSWERS:
        steps = generate_step(tokens, model, max_tokens=N_ANSWER, **ANSWERS[name])
        found[name] = [int(token) for token, _ in steps]
    try:
        found["tova"] = kept(model, tokens, TOVA)
    except SnapKVError as error:
        found["tova"] = str(error)
    return found


def main(folder: str, name: str, kind: str) -> None:
    group = mx.distributed.init()
    model, tokenizer = sharded_load(str(MODELS[name]), **{f"{kind}_group": group})
    model.set_dtype(mx.float32)
    found = run(model, tokenizer)
    try:
        saved.save(Path(folder, "a.safetensors"), model, make_prompt_cache(model), [1])
    except SnapKVError as error:
        found["saved"] = str(error)
    Path(folder, f"{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
