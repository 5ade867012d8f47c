"""Many prompts at once: what the records hold, and what is told of them."""

import pytest
from mlx_lm.generate import BatchGenerator
from model_configs import make_model

from mlx_snapkv.bench import batches
from mlx_snapkv.bench.contenders import snapkv_for
from mlx_snapkv.bench.run import Plan, run
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.policies import SnapKV
from mlx_snapkv.reporting import batch_tables, plots, tables

ENTRY = 2 * 4 * 2 * 32 * 4  # bytes: keys and values, layers, KV heads, head size, float32
MACHINE = {"processor": "p", "cores": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def model():
    return make_model("llama", {"head_dim": 32})


class Progress:
    def __init__(self):
        self.started, self.saved = {}, []

    def start(self, what, parts):
        self.started[what] = parts

    def advance(self): ...

    def save(self, result):
        self.saved.append(len(result["batches"]))


def plan():
    sizes = {"trials": 1, "steps": 3, "questions": 0, "policy_for": snapkv_for}
    return Plan([], [], batches=[1, 3], batch_prompts=[1024], **sizes)


@pytest.fixture(scope="module")
def measured(model):
    progress, answer = Progress(), batches.ANSWER
    batches.ANSWER = 6
    try:
        return run(model, None, plan(), progress), progress
    finally:
        batches.ANSWER = answer


def test_every_contender_is_measured_with_every_size(measured):
    result, progress = measured
    assert progress.started["batches"] == 6 and progress.saved[-6:] == [1, 2, 3, 4, 5, 6]
    found = [(r["batch"], r["kind"]) for r in result["batches"]]
    assert found == [(n, kind) for n in (1, 3) for kind in batches.KINDS]
    assert not any(result[part] for part in result if part != "batches")


def test_bytes_are_those_of_the_arrays_while_all_decode(measured):
    for r in measured[0]["batches"]:
        if r["kind"] == "full":  # mlx-lm's buffers grow by 256
            assert 1024 * ENTRY < r["kv_bytes"] / r["batch"] <= (1024 + 256) * ENTRY
        else:
            assert r["kv_bytes"] == r["batch"] * 64 * ENTRY == r["batch"] * r["entries"] * ENTRY


def test_seconds_are_told_of_every_request(measured):
    for r in measured[0]["batches"]:
        first = r["first_seconds"]
        assert len(first) == r["batch"] and first == sorted(first)
        assert 0 < first[0] <= first[-1] < r["run_seconds"]
        assert r["tokens_per_second"] == pytest.approx(r["batch"] / r["step_seconds"])
        assert r["run_tokens_per_second"] > 0 and r["answer"] == 6
        assert r["peak_bytes"] > r["batch"] * r["entries"] * ENTRY
    *_, full, _, snapkv = measured[0]["batches"]
    assert len({f"{s:.2f}" for s in full["first_seconds"]}) == 1  # mlx-lm reads them together
    assert snapkv["first_seconds"][0] < full["first_seconds"][0]


def test_the_generators_are_mlx_lms_and_ours(model):
    field = batches.batch_field(model, 1024, snapkv_for(1024))
    kinds = [type(batches._generator(model, contender, 2)) for contender in field]
    assert kinds == [BatchGenerator, BatchGenerator, batches.CompressedBatchGenerator]
    gated = SnapKV(top_k=20, n_window=64, min_ctx=2000)
    assert [c.kind for c in batches.batch_field(model, 1024, gated)] == ["full", "rotating"]


def test_tables_and_picture(measured):
    result, _ = measured
    together, whole = tables.tables(result)
    assert [row[:3] for row in together.rows] == [row[:3] for row in whole.rows]
    assert together.rows[0][5] == "1.00x" and together.rows[5][:2] == ["3", "1,024"]
    snapkv, full = result["batches"][5], result["batches"][3]
    share = snapkv["kv_bytes"] / full["kv_bytes"]
    assert together.rows[5][-1] == f"{share:.4f}" and share < 1 / 15
    assert whole.rows[5][4].count("/") == 2 and whole.rows[0][4].count("/") == 0
    assert whole.rows[3][3].endswith("s, 1.000") and "until 6 tokens" in whole.remark
    figures = plots.figures(result | {"machine": MACHINE, "model": "m"})
    (axes,) = figures["throughput"].axes
    assert list(figures) == ["throughput"] and len(axes.lines) == 3
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 3]] * 3
    assert batch_tables.together({}).rows == batch_tables.whole_runs({}).rows == []


def test_models_that_mlx_lm_cant_batch_are_refused():
    with pytest.raises(SnapKVError, match="can't decode several prompts together"):
        run(make_model("gpt_bigcode"), None, plan(), Progress())
