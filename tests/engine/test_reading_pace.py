"""Which prompt chunks read all entries, depending on token times: simulated and in real requests."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import plain, steps
from tiny_models import make_llama, make_qwen

from mlx_snapkv import Conversation, prefill
from mlx_snapkv.caches.layers import first_sparse_position
from mlx_snapkv.engine import reading_pace, sparse_mode
from mlx_snapkv.engine.reading_pace import ReadingPace
from mlx_snapkv.planning import prompt_plan, request_plan
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.planning.speed_record import (
    DECODE_FULL,
    READ_FULL,
    READ_SPARSE,
    Measurement,
    Speed,
)
from mlx_snapkv.sparse.options import CHUNK_SIZE, Sparse

STEP = 2048  # tokens of a chunk of mlx-lm's loop
FIRST = 1312  # entries up to which a chunk reads all of them


pytestmark = pytest.mark.filterwarnings("ignore:.*trained length")


@pytest.fixture(autouse=True)
def warm(monkeypatch):
    """Pretend that this process has already read both ways."""
    monkeypatch.setattr(reading_pace, "compiled_kinds", {True, False})


def planned(n_prompt, when="faster", n_held=0):
    sparse = Sparse(budget=400, read_top_k=1024, when=when)
    plan = plan_request(make_llama(), CompressionConfig(sparse), n_prompt)
    return replace(plan, n_new=n_prompt - n_held)


def read(seconds, n_prompt, n_held=0, speed=Speed(), when="faster"):  # noqa: B008
    """Return the chunks `(start, n)` that choose, and the pace, if each token takes `seconds(start, chooses)`."""
    now, chose, start = 0.0, [], n_held
    pace = ReadingPace(planned(n_prompt, when, n_held), speed, lambda: now)
    last_from = n_prompt - request_plan.LAST_TOKENS
    while start < n_prompt:
        stop = min(start + STEP, n_prompt)
        while start < stop:
            pace.end()
            n, chooses = stop - start, start > FIRST and pace.chooses(start)
            if chooses and start < last_from:
                n = min(n, CHUNK_SIZE, last_from - start)
            pace.begin(start, n, chooses)
            chose += [(start, n)] * chooses
            now += n * seconds(start, chooses)
            start += n
    pace.end()
    return chose, pace


def faster(start, chooses):
    return 1.0 if chooses else 2.0


def slower(start, chooses):
    return 2.0 if chooses else 1.0


def test_a_slower_choice_is_tried_again_when_the_text_has_doubled():
    chose, _ = read(slower, 40_000)
    assert chose == [(n, CHUNK_SIZE) for n in (2048, 4096, 8192, 16_384, 32_768)]


def test_a_faster_choice_continues():
    chose, _ = read(faster, 10_000)
    assert chose[0] == (STEP, CHUNK_SIZE) and sum(n for _, n in chose) == 10_000 - STEP
    assert chose[-1] == (10_000 - request_plan.LAST_TOKENS, 272) or chose[-1][0] > 9000


@pytest.mark.parametrize("few, wins", [(0.98, False), (0.96, True)])
def test_a_token_must_be_a_little_faster(few, wins):
    chose, _ = read(lambda start, chooses: few if chooses else 1.0, 6000)
    assert (len(chose) > 2) == wins


def test_the_winner_may_change_with_the_length():
    chose, _ = read(lambda start, chooses: 1.4 if chooses else (start + STEP) / 8192, 40_000)
    assert chose[:2] == [(2048, CHUNK_SIZE), (4096, CHUNK_SIZE)]
    assert sum(n for start, n in chose if start >= 16_384) == 40_000 - 16_384


def test_the_first_chunks_of_a_process_do_not_count_because_they_compile(monkeypatch):
    """Neither the first chunk that reads everything nor the first that chooses is counted."""
    monkeypatch.setattr(reading_pace, "compiled_kinds", set())
    slow = []

    def seconds(start, chooses):
        first = chooses not in slow
        slow.append(chooses)
        return 99.0 if first else faster(start, chooses)

    chose, pace = read(seconds, 12_000)
    assert chose[0][0] == 2 * STEP and sum(n for _, n in chose) == 12_000 - 2 * STEP
    assert all(x.seconds < 99 for x in pace.measurements)


def test_when_always_every_chunk_after_the_first_chooses():
    chose, pace = read(slower, 10_000, when="always")
    assert sum(n for _, n in chose) == 10_000 - STEP and not pace.measurements


def test_a_chunk_in_several_pieces_is_read_one_way():
    pace = ReadingPace(planned(10_000), Speed(), lambda: 0.0)
    pace.begin(0, STEP, False)
    pace.end()
    for chooses in (False, True):
        pace.begin(STEP, STEP, chooses)
        assert [pace.chooses(STEP + n) for n in (0, 512, STEP - 1)] == [chooses] * 3


def test_measurements_are_of_whole_chunks():
    _, pace = read(faster, 8000)
    kinds = {x.kind for x in pace.measurements}
    assert pace.measurements[0] == Measurement(READ_FULL, STEP / 2, 2.0) and READ_SPARSE in kinds
    assert all(x.seconds == (2.0 if x.kind == READ_FULL else 1.0) for x in pace.measurements)


def recorded(few, every):
    return Speed().with_measurements(
        [Measurement(READ_SPARSE, 9000, few), Measurement(READ_FULL, 9000, every)]
    )


@pytest.mark.parametrize(
    "speed, wins", [(recorded(1, 2), True), (recorded(2, 1), False), (Speed(), False)]
)
def test_a_short_turn_follows_the_record(speed, wins):
    """A short turn is not measured. Without a record it reads everything, as with the full cache."""
    chose, _ = read(slower, 9100, n_held=9000, speed=speed)
    assert chose == ([(9000, 100)] if wins else [])


def test_a_long_turn_measures_again():
    chose, _ = read(faster, 9000 + 3 * STEP, n_held=9000, speed=recorded(2, 1))
    assert chose[0][0] == 9000 + STEP


# Requests with an invented clock.

BUDGET = "budget=400,n_sink=4,n_window=32,read_top_k=32"
SHORT_STEP = 1024  # tokens of a chunk here, because a CPU takes long for larger ones
N = 3 * SHORT_STEP
PROMPT = mx.array(np.random.default_rng(0).integers(1, 64, N))


@pytest.fixture
def clock(monkeypatch):
    """Return a function that makes a token take `seconds(start, chooses)`, and returns a list of the chunks read."""

    def make(seconds):
        chunks = []

        def now():
            return sum(n * seconds(start, chooses) for start, n, chooses in chunks)

        class Told(ReadingPace):
            def __init__(self, plan, recorded):
                super().__init__(plan, recorded, now)

            def begin(self, start, n, chooses):
                super().begin(start, n, chooses)
                chunks.append((start, n, chooses))

        monkeypatch.setattr(sparse_mode, "ReadingPace", Told)
        return chunks

    monkeypatch.setattr(prompt_plan, "largest_chunk", lambda: SHORT_STEP)
    return make


@pytest.mark.parametrize("make", [make_llama, make_qwen])
def test_a_prompt_whose_chunks_all_read_everything_counts_as_dense(make, clock, monkeypatch):
    monkeypatch.setattr(reading_pace, "CHUNK_SIZE", N)  # no chunk is long enough to be measured
    chunks, model, reports = clock(slower), make(), []
    monkeypatch.setattr(prompt_plan, "largest_chunk", lambda: CHUNK_SIZE)
    prompt, cache = PROMPT[: 3 * CHUNK_SIZE], make_prompt_cache(model)
    options = {"prompt_cache": cache, "on_report": reports.append}
    found = steps(model, prompt, 3, sparse=BUDGET, **options)
    wanted = plain(model, prompt, 3)
    assert [token for token, _ in found] == [token for token, _ in wanted]
    assert all(mx.allclose(a, b, atol=1e-3) for (_, a), (_, b) in zip(found, wanted))
    assert reports[0].read_per_chunk is None and "by a chunk" not in str(reports[0])
    assert [(n, chooses) for _, n, chooses in chunks[:3]] == [
        (CHUNK_SIZE, False),
        (CHUNK_SIZE, False),
        (CHUNK_SIZE - 1, False),
    ]
    assert first_sparse_position(cache) is None


@pytest.mark.parametrize("times, n_chosen", [(slower, 2), (faster, 3)])
def test_a_prompt_is_read_the_faster_way(times, n_chosen, clock):
    """The prompt is so short that its last tokens read everything."""
    chunks, model = clock(times), make_llama()
    cache, report = prefill(model, PROMPT, sparse=BUDGET)
    assert first_sparse_position(cache) == SHORT_STEP and report.read_per_chunk is not None
    assert [n for _, n, chooses in chunks if chooses] == [CHUNK_SIZE] * n_chosen
    assert sum(n for _, n, _ in chunks) == N


def test_always_chooses_from_the_first_chunk_on(clock):
    chunks, model = clock(slower), make_llama()
    cache, _ = prefill(model, PROMPT, sparse=f"{BUDGET},when=always")
    assert first_sparse_position(cache) == CHUNK_SIZE and all(n <= CHUNK_SIZE for _, n, _ in chunks)


def test_an_answer_extends_the_record_once(clock, record):
    model = make_llama()
    clock(faster)
    steps(model, PROMPT, 12, sparse=BUDGET)
    (lines,) = json.loads(record.read_text())["speeds"].values()
    assert set(lines) == {READ_FULL, READ_SPARSE, DECODE_FULL}
    record.unlink()
    for sparse in (f"{BUDGET},when=always", None):
        steps(model, PROMPT[:1000], 2, sparse=sparse)
    assert not record.exists()


def test_turns_are_read_either_way(demo_llama, clock):
    model, tokenizer = demo_llama
    chunks = clock(faster)
    talk = Conversation(model, tokenizer, sparse=BUDGET, max_tokens=2)
    for _ in range(2):
        list(talk.send("one two three four five six seven eight nine ten " * 150))
    assert any(chooses for *_, chooses in chunks) and len(talk.read) >= 3000
