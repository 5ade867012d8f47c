"""The benchmark's measurements on small models: what they count, not how fast anything is."""

import json
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from model_configs import make_model

from mlx_snapkv import ReselectingSnapKVCache
from mlx_snapkv.bench.book import book_field, measure_book
from mlx_snapkv.bench.contenders import contenders, decoding_cache, request_cache, snapkv_for
from mlx_snapkv.bench.decode import measure_decoding, requesters
from mlx_snapkv.bench.needle import measure_needles
from mlx_snapkv.bench.own_memory import EVERY, OwnMemory, own_memory
from mlx_snapkv.bench.requests import measure_requests
from mlx_snapkv.bench.run import Plan, run
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.policies import SnapKV
from mlx_snapkv.reporting import plots, tables

DOCS = Path(__file__).parent.parent.parent / "docs"
CACHES = {
    "rotating": RotatingKVCache,
    "quantized": QuantizedKVCache,
    "snapkv": ReselectingSnapKVCache,
}


@pytest.fixture(scope="module")
def model():
    return make_model("llama", {"head_dim": 32})


def by_kind(records):
    return {record["kind"]: record for record in records}


@pytest.mark.parametrize("context", [1024, 4096, 100_000])
def test_the_default_policy_keeps_a_sixteenth(context):
    policy = snapkv_for(context)
    assert policy.budget == context // 16 and policy.min_ctx == 0


def test_below_its_gate_snapkv_is_not_a_contender(model):
    gated = SnapKV(top_k=20, n_window=64, min_ctx=1001)
    kinds = [c.kind for c in contenders(model, 1000, gated)]
    assert kinds == ["full", "rotating", "quantized", "quantized"]
    kinds = [c.kind for c in contenders(model, 1000, SnapKV())]
    assert kinds == ["full", "quantized", "quantized"]


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gpt_oss"])
def test_only_full_attention_layers_are_filled(name):
    model = make_model(name)
    for contender in contenders(model, 1024, snapkv_for(1024)):
        cache = decoding_cache(model, contender, 1024)
        plain = make_prompt_cache(model)
        layers = attention_layers(model, plain)
        for layer in layers:
            filled = layer.cache_in(cache)
            assert type(filled) is CACHES.get(contender.kind, type(layer.cache_in(plain)))
            rows = 1024 if contender.kind == "rotating" else contender.entries
            keys = filled.keys[0] if contender.kind == "quantized" else filled.keys
            assert rows <= keys.shape[2] < rows + 512
        others = set(range(len(plain))) - {layer.index for layer in layers}
        assert all(type(cache[i]) is type(plain[i]) for i in others)


def test_decoding_records_hold_what_the_arrays_hold(model):
    records = by_kind(measure_decoding(model, 1024, snapkv_for(1024), steps=3))
    assert set(records) == {"full", "rotating", "quantized", "plain", "snapkv"}
    bytes_per_row = 2 * 4 * 2 * 32 * 4  # keys and values, layers, KV heads, head size, float32
    assert records["full"]["kv_bytes"] == 1024 * bytes_per_row
    assert records["plain"]["kv_bytes"] == (64 - 1) * bytes_per_row  # the step's own is the 64th
    assert records["snapkv"]["kv_bytes"] == records["rotating"]["kv_bytes"] == 64 * bytes_per_row
    for record in records.values():
        assert record["tokens_per_second"] == pytest.approx(1 / record["step_seconds"])


def test_a_cache_that_mlx_lm_cannot_decode_from_is_left_out():
    kinds = set(
        by_kind(
            measure_decoding(make_model("gpt_oss", {"head_dim": 32}), 1024, snapkv_for(1024), 1)
        )
    )
    # Quantised entries don't take attention sinks.
    assert kinds == {"full", "rotating", "plain", "snapkv"}


def test_every_finished_part_is_saved(model):
    saved = []

    class Progress:
        def start(self, what, parts): ...

        def advance(self): ...

        def save(self, result):
            saved.append({name: len(records) for name, records in result.items()})

    sizes = {"trials": 1, "steps": 1, "questions": 0, "policy_for": snapkv_for}
    plan = Plan([1024], [1024], long_prompts=[3000], verified=[1024], **sizes)
    result = run(model, None, plan, Progress())
    assert len(saved) == 4 and result["book"] == result["batches"] == []
    assert saved[0]["decode"] == len(result["decode"]) > 0
    assert saved[0]["verified"] == 0 < saved[1]["verified"] and saved[1]["requests"] == 0
    assert saved[3] == {name: len(records) for name, records in result.items()}


def test_request_records_hold_the_rows_that_stay(model):
    done = []
    prompt = mx.random.randint(1, 100, (1024,))
    field = requesters(model, 1024, snapkv_for(1024))
    records = measure_requests(model, prompt, field, 2, lambda: done.append(1))
    assert len(done) == 2 + 2 + 3 == sum(record["trials"] for record in records)
    kinds = by_kind(records)
    assert kinds["snapkv"]["selection_seconds"] > 0 == kinds["full"]["selection_seconds"]
    share = kinds["snapkv"]["kv_bytes"] / kinds["full"]["kv_bytes"]
    assert share == pytest.approx(64 / (1024 + 8))
    assert kinds["rotating"]["kv_bytes"] == kinds["snapkv"]["kv_bytes"]
    assert kinds["quantized"]["kv_bytes"] < kinds["full"]["kv_bytes"] / 3


def test_a_book_is_on_disk_and_the_full_cache_in_memory(model):
    field = {c.kind: (n, c) for n, c in book_field([3000, 4000]) if n == 3000}
    assert set(field) == {"book", "book 4", "recall", "full"}
    records = {kind: measure_book(model, *wanted) for kind, wanted in field.items()}
    token = 2 * 4 * 2 * 32 * 4  # keys and values, layers, KV heads, head size, float32
    disk = {kind: record["disk_bytes_per_token"] for kind, record in records.items()}
    assert disk == {"book": token, "book 4": token * (4 / 32 + 2 / 32), "recall": token, "full": 0}
    book, full = records["book"], records["full"]
    assert full["kv_bytes"] > 3000 * token > 2048 * token <= book["kv_bytes"] <= 2600 * token
    assert book["gathered"] == 128 + 1024 + 512 and full["gathered"] == 0
    parts = [book[f"{part}_seconds"] for part in ("vote", "gather", "read_again")]
    assert 0 < sum(parts) < book["question_seconds"]
    assert "vote_seconds" not in full


def test_books_are_saved_one_by_one(model):
    saved, started = [], {}

    class Progress:
        def start(self, what, parts):
            started[what] = parts

        def advance(self): ...

        def save(self, result):
            saved.append(len(result["book"]))

    sizes = {"trials": 1, "steps": 1, "questions": 0, "policy_for": snapkv_for, "books": [3000]}
    result = run(model, None, Plan([], [], **sizes), Progress())
    assert saved[-6:] == [1, 2, 3, 4, 5, 6] and started["books"] == 6
    reading, asking = tables.tables(result)
    assert (reading.title, asking.title) == ("Reading a book", "Asking a book")
    assert "not read beyond 3,000 tokens" in reading.remark


def test_own_memory_is_seen_while_it_is_held():
    memory, before = OwnMemory(), own_memory()
    with memory.watched():
        held = np.ones(200 << 20, np.uint8)
        until = time.monotonic() + 10
        while memory.most < before + (150 << 20):
            assert time.monotonic() < until
            time.sleep(EVERY)
        del held


def test_the_rotating_cache_is_put_in_where_mlx_lm_ignores_the_option(model):
    rotating = next(c for c in contenders(model, 1024, snapkv_for(1024)) if c.kind == "rotating")
    assert [type(c) for c in request_cache(model, rotating)] == [RotatingKVCache] * 4


def test_answers_are_counted(demo_model):
    model, tokenizer = demo_model[:2]
    answered, questions = [], 3
    records = by_kind(
        measure_needles(model, tokenizer, 1024, snapkv_for, questions, lambda: answered.append(1))
    )
    assert len(answered) == questions * 5
    assert records["full"]["right"] == questions
    assert records["rotating"]["right"] < records["snapkv"]["right"]


@pytest.mark.parametrize("name", sorted(path.stem for path in DOCS.glob("benchmarks*.json")))
def test_the_docs_pages_are_their_results(name):
    result = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == tables.markdown(result, name)
    assert all((DOCS / f"{name}-{plot}.png").is_file() for plot in plots.figures(result))
