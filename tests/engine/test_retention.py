"""Requests whose entries all stay: what they refuse and leave alone, and what they keep."""

import functools

import numpy as np
import pytest
import reference
from entry_helpers import exact_up_to
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import plain, steps
from tiny_models import make_llama

from mlx_snapkv import SnapKVError, prefill
from mlx_snapkv.caches.memories import make_caches
from mlx_snapkv.engine import policy
from mlx_snapkv.engine.compress import choose_entries, competing
from mlx_snapkv.engine.prefill import mlx_generate
from mlx_snapkv.engine.report import format_bytes
from mlx_snapkv.engine.serving import served
from mlx_snapkv.planning.config import CompressionConfig

POLICY = "snapkv:top_k=20,n_sink=4,n_window=16,obs_window=8,pool_kernel=5,lookahead=0"
SPARSE = {"policy": None, "sparse": "budget=40,n_sink=4,n_window=16,read=dense"}
RECALLING = ["recall", "recall:8bit", "recall:file"]
STAGES = f"keydiff:budget=64,block=32 then {POLICY}"
READS_ANY = "evicts while it reads: give sparse instead, which reads a prompt of any length in little memory, or"
WRONG = [
    ({"memory": "remember"}, "memory must be drop, recall"),
    ({"policy": "h2o:budget=64,schedule=once", "memory": "recall"}, "sums the attention of all queries"),
    ({"policy": STAGES, "memory": "recall"}, f"^memory=recall keeps all entries, but .* {READS_ANY}"),
    ({"policy": "h2o:budget=64", "memory": "recall"}, f"h2o:budget=64 {READS_ANY} memory=drop$"),
]  # fmt: skip


@pytest.fixture
def wide():
    """A random model whose heads can be quantised."""
    return make_llama(head_dim=32)


@pytest.fixture
def kept(monkeypatch):
    """For each layer of each compression: keys of all entries, the queries that voted, the positions kept."""
    found = []

    def watched(layers, caches, plan):
        choices = choose_entries(layers, caches, plan)
        for layer, choice in zip(layers, choices):
            entries, _ = competing(layer, caches, plan)
            found.append((np.array(entries.keys), entries.voters, np.array(choice.kept[0])))
        return choices

    monkeypatch.setattr(policy, "choose_entries", watched)
    return found


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_can_not_be_served_is_refused_at_the_call(wide, tokens, options, message):
    with pytest.raises(SnapKVError, match=message):
        steps(wide, tokens, **{"policy": POLICY} | options)


KEEPING = [
    {"policy": POLICY, "memory": "recall"},
    {"policy": POLICY, "memory": "recall:file"},
    SPARSE,
    SPARSE | {"memory": "recall:file"},
]


@pytest.mark.parametrize("options", KEEPING, ids=str)
def test_a_prompt_cache_holds_the_whole_prompt_and_goes_on(wide, tokens, options):
    """The next request votes over all entries: it keeps what one request for the whole prompt would."""
    reports, cache = [], make_prompt_cache(wide)
    steps(wide, tokens[:150], 6, prompt_cache=cache, **options)
    # The first token of the answer was fed before the compression.
    assert {c.offset for c in cache} == {151}
    for c in cache:
        c.trim(1)
    found = steps(wide, tokens[150:], prompt_cache=cache, on_report=reports.append, **options)
    assert reports[0].compressed and reports[0].prompt_tokens == 200
    wanted = steps(wide, tokens, **options)
    assert [t for t, _ in found] == [t for t, _ in wanted]


@pytest.mark.parametrize(
    "options", [{"policy": POLICY, "memory": "recall:8bit"}, SPARSE | {"memory": "recall:file"}]
)
def test_a_question_of_a_single_token_votes_by_itself(wide, tokens, options):
    cache, reports = make_prompt_cache(wide), []
    plain(wide, tokens[:-1], 0, prompt_cache=cache)
    options = options | {"prompt_cache": cache, "on_report": reports.append}
    assert len(steps(wide, tokens[-1:], **options)) == 12
    assert reports[0].compressed and reports[0].prompt_tokens == 200


def test_with_a_policy_every_turn_keeps_what_its_own_queries_choose_of_all(wide, tokens, kept):
    """By NumPy: also what an earlier turn did not keep; and its answer is decoded from a small cache."""
    cache, reports = make_prompt_cache(wide), []
    options = {"policy": POLICY, "memory": "recall", "prompt_cache": cache}
    for turn in (tokens[:120], tokens[120:160], tokens[160:]):
        steps(wide, turn, 1, on_report=reports.append, **options)
    assert [r.entries for r in reports] == [40, 40, 40]
    assert [r.read_per_token for r in reports] == [None] * 3
    assert len(kept) == 3 * len(wide.layers)
    for (keys, voters, places), n in zip(kept, (120, 120, 161, 161, 202, 202)):
        assert keys.shape[2] == n and voters.places == range(n - 8, n)
        voting = np.array(voters.heads), keys, voters.places, voters.scale
        scores = reference.forward_scores(*voting, n_ahead=0, ends=(4, 16), kernel=5)
        for found, of_head in zip(places.tolist(), scores[0], strict=True):
            assert found == reference.select(of_head, 4, 20, 16)


@pytest.mark.parametrize("memory", RECALLING)
def test_a_compressed_prompt_cache_has_nothing_to_recall(wide, tokens, memory):
    cache, _ = prefill(wide, tokens, POLICY)
    with pytest.raises(SnapKVError, match="needs a prompt cache with all entries"):
        steps(wide, tokens, policy=POLICY, memory=memory, prompt_cache=cache)


IN_MEMORY = ["recall", "recall:8bit", "recall:4bit"]
WAYS = [
    *(SPARSE | {"memory": memory} for memory in [*IN_MEMORY, "recall:file", "recall:file:8bit"]),
    {"sparse": "budget=40,n_window=16", "memory": "recall:8bit"},
    *({"policy": POLICY, "memory": memory} for memory in ("recall", "recall:file:8bit")),
]


@pytest.mark.parametrize("few", [50, 8192])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_the_kv_memory_counts_all_that_is_in_memory(wide, tokens, options, few, monkeypatch):
    """Every array once: what a token reads, the index among it, and beside that what stays."""
    exact_up_to(monkeypatch, few)
    config, _ = CompressionConfig.taken_from(options, turns=True)
    caches, found = make_caches(wide, config.memory), []

    def compressed(report):
        stays = sum(cache.store.nbytes for cache in caches)
        found.append((report, stays, sum(cache.index_nbytes for cache in caches)))

    start = functools.partial(mlx_generate.generate_step, tokens, max_tokens=2)
    list(served(start, wide, 200, 2, config, compressed, {"prompt_cache": caches}))
    ((report, stays, index),) = found
    chooses = report.read_per_token is not None
    assert chooses == config.is_sparse
    assert (index > 0) == (few == 50 and chooses)
    one = report.kv_bytes_before / len(caches) / 201
    read = index + one * (sum(report.entries_kept) + report.means * len(caches))
    assert report.kv_bytes_staying == stays
    assert report.kv_bytes_after == report.kv_bytes_read + stays
    # What the prompt chose has room for more.
    assert report.kv_bytes_read == pytest.approx(read) if chooses else report.kv_bytes_read > read
    assert report.file_bytes == sum(cache.store.file_nbytes for cache in caches)
    where = format_bytes(report.file_bytes or stays)
    assert f": a token reads {format_bytes(report.kv_bytes_read)} (float32" in str(report)
    assert f"all 200 entries stay in {where}" in str(report)
    assert report.warnings == []
