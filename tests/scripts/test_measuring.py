import random

import mlx.core as mx
import pytest
from model_configs import make_model

from mlx_snapkv import SnapKV, generate_step
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.spans import BLOCK_SIZE
from mlx_snapkv.measure.contenders import full_and_policies
from mlx_snapkv.measure.divergence import divergence
from mlx_snapkv.measure.methods import Method
from mlx_snapkv.planning.settings import setting_named
from mlx_snapkv.sparse import clusters
from mlx_snapkv.sparse.options import CHUNK_WINDOW, PAGE_SIZE
from scripts import (
    measure_batches,
    measure_bits,
    measure_books,
    measure_facts,
    measure_long_answers,
    measure_residual,
    measure_servers,
)
from scripts.measure_servers import Answer, tokens_while_all_answer

ENTRY = 2 * 4 * 2 * 32 * 4  # bytes: keys and values * layers * KV heads * head size * float32


def test_measure_facts_asks_for_one_fact_per_turn(demo_llama):
    ways = {(way.table, way.name, way.share): way for way in measure_facts.ways(1024)}
    assert len(ways) == 1 + 3 + 2 + 4 * 4
    full, dropped = ways["memories", "full cache", 16], ways["memories", "SnapKV", 16]
    found = [measure_facts.measure(*demo_llama, way, 1024, 1, 3) for way in (full, dropped)]
    assert [row["asked"] for row in found] == [3, 3] and found[0]["right"] == 3
    assert found[0]["held_bytes"] == found[0]["decoding_bytes"] > 8 * found[1]["decoding_bytes"]


@pytest.mark.parametrize("way", ["pages of 256", "clusters of 32"])
def test_grouping_changes_the_clusters_within_its_block(way):
    keys = mx.random.normal((1, 2, 2 * BLOCK_SIZE, 8), key=mx.random.key(1))
    before, (group, size) = clusters.CLUSTER_SIZE, measure_residual.WAYS[way]
    with measure_residual.grouping(group, size):
        made = clusters.cluster_entries(Entries(keys, keys))
        assert made.n_clusters == 2 * BLOCK_SIZE // size
        # Clusters kept between turns must have the new size, too.
        assert mx.array_equal(made.complete_blocks().to_clusters().ids, made.ids)
    assert before == clusters.CLUSTER_SIZE


def test_a_batchs_bytes_equal_the_bytes_of_its_arrays(monkeypatch):
    monkeypatch.setattr(measure_batches, "ANSWER", 6)
    policy = Compress(SnapKV(budget=64, on_full="slide"))
    field = full_and_policies(1024, [policy])
    model = make_model("llama", {"head_dim": 32})
    full, ours = (measure_batches.decoding_together(model, 1024, 3, each, 2) for each in field)
    # mlx-lm's buffers grow by 256 entries.
    assert 1024 * ENTRY < full["kv_bytes"] / 3 <= (1024 + 256) * ENTRY
    assert ours["kv_bytes"] == 3 * 64 * ENTRY
    run = measure_batches.whole_run(model, 1024, 3, field[1])
    first = run["first_seconds"]
    assert len(first) == 3 and 0 < first[0] < first[-1] < run["run_seconds"]


def test_tokens_are_counted_while_all_answers_run():
    early = Answer(0, pieces=[1.0, 2.0, 3.0, 4.0], usage={"completion_tokens": 4})
    late = Answer(0, pieces=[2.5, 3.5, 4.5, 5.5], usage={"completion_tokens": 8})
    assert tokens_while_all_answer([[early, late]]) == (2 + 2, 1.5)  # two tokens per piece
    after = Answer(0, pieces=[4.5, 5.0], usage={"completion_tokens": 2})
    assert tokens_while_all_answer([[early, after]]) == (0, 0)


def test_a_client_asks_a_server_four_times(demo_llama, monkeypatch):
    monkeypatch.setattr(measure_servers, "ANSWER", 8)
    command = ["mlx_snapkv", "serve", "--model", "demo"]
    row = measure_servers.measure(command, demo_llama[1], 600, 1)
    assert row["questions"] == 4 and row["right"] >= 3
    assert len(row["first_seconds"]) == 1 and len(row["follow_up_seconds"]) == 3
    assert row["follow_up_tokens"] > 600
    assert 0.9 < row["cached_tokens"] / row["follow_up_tokens"] < 1
    assert row["process_bytes"] > 50_000_000


def test_a_books_entries_are_on_disk_and_the_full_cache_is_in_memory():
    model = make_model("llama", {"head_dim": 32})
    cases = measure_books.cases([3000, 4000])
    assert [case[:2] for case in cases[-3:]] == [(n, "full cache") for n in (750, 1500, 3000)]
    ours, full = (
        measure_books.measure(model, next(case for case in cases if case[:2] == (3000, name)))
        for name in ("book", "full cache")
    )
    assert (ours["disk_bytes_per_token"], full["disk_bytes_per_token"]) == (ENTRY, 0)
    assert full["kv_bytes"] > 3000 * ENTRY and ours["kv_bytes"] < 3000 * ENTRY / 50  # means only
    assert ours["entries"] == 128 + 1024 + CHUNK_WINDOW + PAGE_SIZE - 1 and full["entries"] == 3000
    assert ours["gathered"] == 128 + 1024 + 512 and full["gathered"] == 0
    assert ours["question_seconds"] > 0


def test_predictions_from_few_bits_are_those_of_mlx_lms_quantised_cache(demo_llama):
    model, tokenizer = demo_llama
    text, _ = make_haystack(tokenizer, random.Random(0), 3, 700)
    tokens = tokenizer.encode(text)
    prompt, following = tokens[:500], tokens[500:540]
    rows = {row["bits"]: row for row in measure_bits.compare(model, prompt, following, [8, 2])}
    assert rows[8]["kl"] < rows[2]["kl"] / 10 and rows[8]["same"] > rows[2]["same"]
    # mlx-lm quantises before it reads the prompt's last token, and also predicts the first token that follows.
    in_2_bits = {"kv_bits": 2, "kv_group_size": 64, "quantized_kv_start": 0}
    expected = measure_residual.predictions(model, prompt, following)
    found = measure_residual.predictions(model, prompt, following, **in_2_bits)
    kl = divergence(expected, found)[1:].mean().item()
    assert rows[2]["kl"] == pytest.approx(kl, rel=0.2)


def test_long_answers_are_compared_token_by_token_with_the_full_caches(demo_llama):
    """The reference is generate_step, with and without a sampler that returns the full cache's own tokens."""
    model, tokenizer = demo_llama
    text, _ = make_haystack(tokenizer, random.Random(0), 3, 700)
    prompt, most = tokenizer.encode(text)[:500], 80
    methods = [
        Method(setting_named(text))
        for text in ("snapkv:budget=12.5%", "sparse:budget=16,n_sink=2,n_window=4")
    ]
    rows = [*measure_long_answers.measure(model, tokenizer, [prompt], methods, most)]
    full = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=most)]
    assert [row["method"] for row in rows] == [m.name for m in methods] and len(full) == most
    expected = measure_residual.predictions(model, prompt, full)
    for method, row in zip(methods, rows, strict=True):
        found = measure_residual.predictions(model, prompt, full, policy=method.policy)[2:]
        kl = divergence(expected[2:], found)
        same = mx.argmax(expected[2:], axis=-1) == mx.argmax(found, axis=-1)
        assert [(s["start"], s["stop"], s["n"]) for s in row["spans"]] == [
            (0, 64, 62),
            (64, 128, 16),
        ]
        for span, own in zip(row["spans"], (slice(0, 62), slice(62, None))):
            assert (
                span["kl"] == pytest.approx(kl[own].mean().item(), abs=1e-6) and span["kl"] > 1e-6
            )
            assert span["same"] == pytest.approx(same[own].mean().item(), abs=0.02)
        steps = generate_step(mx.array(prompt), model, max_tokens=most, policy=method.policy)
        pairs = enumerate(zip(full, (token for token, _ in steps)))
        assert row["differs"] == [next((i for i, (a, b) in pairs if a != b), most)]
        assert row["tokens"] == [most]
    assert rows[0]["spans"][0]["kl"] > rows[1]["spans"][0]["kl"]
    drawn = measure_long_answers.figure([row | {"model": "m", "kind": "k"} for row in rows])
    upper, lower = drawn.axes
    assert len(upper.lines) == len(lower.lines) == 2
