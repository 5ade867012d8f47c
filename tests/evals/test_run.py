import pytest
from tiny_models import make_llama

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.evals.grid import cells
from mlx_snapkv.evals.lines import FACTS, Lines
from mlx_snapkv.evals.needle import Needle
from mlx_snapkv.evals.results import Results
from mlx_snapkv.evals.run import FULL, check, contenders, run
from mlx_snapkv.evals.summary import summarise, table
from mlx_snapkv.reporting.heatmap import accuracies, write_heatmaps
from mlx_snapkv.reporting.setting import setting

GRID = cells([1024], 2, 1)
POLICIES = contenders(["random:budget=3%", "snapkv"])


@pytest.fixture(scope="module")
def records(demo_llama):
    model, tokenizer = demo_llama
    return run(model, tokenizer, Needle(tokenizer), GRID, POLICIES, Results({}))


def of(summary, policy):
    (found,) = [s for s in summary if s["policy"] == policy]
    return found


def test_the_full_cache_finds_what_random_rows_lose(records):
    assert [r["policy"] for r in records] == [*POLICIES] * 2
    full, random = (of(summarise(records), p) for p in (FULL, "random:budget=3%"))
    assert (full["right"], full["asked"]) == (2, 2)
    assert random["right"] < 2
    assert random["entries"] == 30 and random["reason"] is None
    assert full["entries"] == max(r["prompt_tokens"] for r in records)
    assert random["kv_bytes"] < full["kv_bytes"]


def test_an_uncompressed_prompt_never_counts_as_the_policys(records, tmp_path):
    left_alone = of(summarise(records), "snapkv")
    assert "below min_ctx=49152" in left_alone["reason"]
    made = table(summarise(records), "T")
    assert [row[1] for row in made.rows] == ["2/2", "0/2", "not compressed"]
    assert "Not compressed, so not counted: snapkv at 1,024 tokens" in made.remark
    _, _, grid = accuracies([r for r in records if r["policy"] == "snapkv"])
    assert all(share != share for row in grid for share in row)  # NaN
    paths = write_heatmaps({"records": records, "model": "demo"} | setting(), tmp_path / "n")
    assert [p.name for p in paths] == [
        "n-full-cache.png",
        "n-random-budget=3pct.png",
        "n-snapkv.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_an_interrupted_run_goes_on_where_it_was(demo_llama, records, tmp_path):
    model, tokenizer = demo_llama
    asked = []

    def stop_at_four():
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt

    def again(on_answer):
        results = Results({"task": "needle"}, tmp_path / "r.jsonl")
        return run(model, tokenizer, Needle(tokenizer), GRID, POLICIES, results, on_answer)

    with pytest.raises(KeyboardInterrupt):
        again(stop_at_four)
    assert again(lambda: asked.append(1)) == records
    assert len(asked) == 6
    assert again(lambda: asked.append(1)) == records
    assert len(asked) == 6


def test_lines_show_what_pooling_is_worth(demo_llama):
    model, tokenizer = demo_llama
    policy = "snapkv:budget=12.5%,n_sink=4,n_window=32,min_ctx=0,lookahead=0"
    policies = contenders([f"{policy},pool_kernel=1", policy])
    task = Lines(tokenizer, wording=FACTS)
    summary = summarise(run(model, tokenizer, task, cells([1024], 4, 1), policies, Results({})))
    full, unpooled, pooled = (s["right"] for s in summary)
    assert full == pooled == 4 and unpooled < 4


@pytest.mark.parametrize(
    "policy, words",
    [
        ("snapkv", "snapkv would compress nothing here: the prompt's 512 tokens are below min_ctx"),
        (
            "keydiff:budget=4096",
            "would compress nothing here: the prompt's 512 entries fit the budget",
        ),
        ("snapkv:budget=10%,min_ctx=0", "snapkv option budget must be at least 640"),
        ("keydiff:budget=10% then snapkv:min_ctx=0,budget=5%", "budget must be at least 640"),
    ],
)
def test_mistakes_show_before_anything_is_measured(policy, words):
    with pytest.raises(SnapKVError, match=words):
        check(make_llama(), contenders([policy]), [256, 512])


def test_a_policy_that_compresses_some_lengths_is_measured():
    check(make_llama(), contenders(["keydiff:budget=300,min_ctx=400"]), [256, 512])


def test_the_full_cache_comes_first_and_policies_once():
    assert [*contenders(["tova:budget=9", "tova:budget=9", "random"])] == [
        FULL,
        "tova:budget=9",
        "random",
    ]
