"""Servers side by side, each as it is: what their records hold, and what is told of them."""

import pytest

from mlx_snapkv.bench import clients, servers
from mlx_snapkv.bench.clients import Answer, tokens_while_all_answer
from mlx_snapkv.bench.contenders import snapkv_for
from mlx_snapkv.bench.run import Plan
from mlx_snapkv.bench.server_process import running
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.reporting import server_tables, tables

ENTRY = 2 * 3 * 2 * 64 * 4  # bytes: keys and values, layers, KV heads, head size, float32
LENGTH, N = 1024, 2
MACHINE = {"processor": "p", "cores": 1, "system": "s", "device": "cpu", "blas": "b"}
ABOUT = {"command": "c", "commit": "0", "model": "demo", "versions": {}, "machine": MACHINE}


class Progress:
    def __init__(self):
        self.started, self.saved = {}, []

    def start(self, what, parts):
        self.started[what] = parts

    def advance(self): ...

    def save(self, result):
        self.saved.append(len(result["server"]))


@pytest.fixture(scope="module")
def measured(demo_llama):
    sizes = {"trials": 0, "steps": 0, "questions": 0, "policy_for": snapkv_for}
    progress = Progress()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "ANSWER", 24)
        patch.setattr(servers, "ANSWER", 24)
        found = servers.measure_servers(
            "demo", demo_llama[1], Plan([], [LENGTH], **sizes), [N], progress
        )
    assert progress.started == {"servers": 3} and progress.saved == [1, 2, 3]
    return found


def test_every_server_answers_every_question(measured):
    records = measured["server"]
    assert [r["kind"] for r in records] == ["mlx-lm", "recall", "drop"]
    for r in records:
        assert (r["context"], r["clients"], r["questions"]) == (LENGTH, N, 4 * N)
        assert len(r["first_seconds"]) == N and len(r["follow_up_seconds"]) == 3 * N
        assert r["first_seconds"][-1] < r["run_seconds"]
        # all answers have their 24 tokens
        n_tokens = r["tokens_per_second"] * r["run_seconds"]
        assert n_tokens == pytest.approx(4 * N * 24)
        assert r["follow_up_tokens"] > LENGTH
        assert 0.9 < r["cached_tokens"] / r["follow_up_tokens"] < 1
        assert r["peak_bytes"] < r["own_bytes"]
    assert records[0]["right"] >= 3 * N


def test_bytes_are_those_of_the_arrays_on_both_sides(measured):
    full, *ours = measured["server"]
    for r in measured["server"]:  # the first may have ended before the last has begun
        share = 1 if r is full else 1 / 16
        each = r["kv_bytes"] / r["kv_requests"] / (LENGTH * ENTRY * share)
        assert 1 <= each < 1.5 and 1 <= r["kv_requests"] <= N
    recall, drop = ours
    assert full["prefix_bytes"] > N * LENGTH * ENTRY < recall["prefix_bytes"]
    assert drop["prefix_bytes"] < full["prefix_bytes"] / 2
    assert full["peak_bytes"] > recall["peak_bytes"]


def test_tables(measured):
    waiting, holding = tables.tables(ABOUT | measured)
    full, recall, drop = measured["server"]
    assert [row[:3] for row in waiting.rows] == [row[:3] for row in holding.rows]
    assert waiting.rows[1][:3] == ["2", "1,024", "ours, recall"]
    assert waiting.rows[0][5].endswith(", 1.00x") and "24 tokens" in waiting.remark
    assert waiting.rows[1][4].endswith(f"{recall['follow_up_seconds'][-1]:.2f} s")
    each = [r["kv_bytes"] / r["kv_requests"] for r in (drop, full)]
    assert holding.rows[2][4] == f"{each[0] / each[1]:.4f}"
    assert holding.rows[0][-1] == f"{full['right']}/8"
    page = tables.markdown(ABOUT | measured, "name")
    assert "## What a server holds" in page and "Plots" not in page
    assert server_tables.waiting({}).rows == server_tables.holding({}).rows == []


def test_what_never_happened_is_told(measured):
    full, recall, _ = measured["server"]
    alone = recall | {"together_tokens_per_second": None, "kv_requests": 1}
    told = {"server": [full, alone]}
    assert server_tables.waiting(told).rows[1][-1] == "never"
    assert server_tables.holding(told).rows[1][3].endswith(" of 1")


def test_tokens_count_from_the_last_to_begin_to_the_first_to_end():
    early = Answer(0, pieces=[1.0, 2.0, 3.0, 4.0], n_tokens=4)
    late = Answer(0, pieces=[2.5, 3.5, 4.5, 5.5], n_tokens=8)  # two tokens a piece
    assert tokens_while_all_answer([[early, late]]) == (2 + 2, 1.5)
    after = Answer(0, pieces=[4.5, 5.0], n_tokens=2)
    assert tokens_while_all_answer([[early, after]]) == (0, 0)


def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(SnapKVError, match=r"mlx_snapkv serve has ended, saying: .*no such folder"),
        running(["mlx_snapkv", "serve", "--model", "nowhere"]),
    ):
        pass
