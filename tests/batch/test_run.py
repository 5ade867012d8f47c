"""Runs over batch files: failing requests, damaged answer files, and planned memory compared with actual arrays."""

import gc
import json

import batch_helpers
import mlx.core as mx
import pytest
from batch_file_helpers import COMPLETIONS, SNAPKV, answer, chat, line, read, said, text, write
from entry_helpers import exact_up_to
from tiny_models import make_llama

from mlx_snapkv import SnapKVError, Sparse
from mlx_snapkv.batch.files import AnswersFile, RequestsFile
from mlx_snapkv.batch.memory import Memory
from mlx_snapkv.batch.run import Run
from mlx_snapkv.planning.entry_sizes import EntrySizes
from mlx_snapkv.planning.settings import resolve_compress, resolve_setting

POLICY = resolve_compress(policy="snapkv:top_k=8,n_sink=2,n_window=8,obs_window=4,lookahead=4")
EVIL = 1000  # the token id at which the model fails


class Failing(type(make_llama())):
    """A model that raises an error when it reads the token EVIL."""

    __module__ = "mlx_lm.models.llama"  # the package finds the model type by this name

    def __call__(self, inputs, cache=None):
        if EVIL in inputs.reshape(-1).tolist():
            raise RuntimeError("out of memory\nsomewhere")
        return super().__call__(inputs, cache)


@pytest.fixture(scope="module")
def failing(demo_llama):
    model = make_llama(vocab_size=1536)
    model.__class__ = Failing
    return model, demo_llama[1]


def ids(custom_id, *more):
    prompt = [*range(10, 50), *more]
    return line(custom_id, COMPLETIONS, prompt=prompt, max_tokens=9, logit_bias={"1": -100})


def answered(loaded, lines, folder, options, **limits):
    """Run a batch file. Return the records, and the maximum bytes and requests seen after any step."""
    path, seen, policy = folder / "a.jsonl", [], options["policy"]
    path.unlink(missing_ok=True)
    answers = AnswersFile(path, "tiny", {"policy": policy and str(policy)})
    run = Run(*loaded, answers, options, **limits)

    def look(_):
        seen.append((run._generator.prompt_cache_nbytes, len(run._active)))

    with answers, write(folder / "r.jsonl", lines).open("rb") as stream:
        run.answer(RequestsFile(stream), look)
    return read(path), *map(max, zip(*seen))


@pytest.mark.parametrize("policy, ended", [(POLICY, {"bad"}), (None, {"a", "bad"})])
def test_a_request_fails_alone_or_without_a_policy_with_its_step(failing, tmp_path, policy, ended):
    """Without a policy, mlx-lm decodes all requests in one step. They all fail then, but the run continues."""
    lines, options = [ids("a"), ids("bad", EVIL), ids("b", 5), ids("c", 7)], {"policy": policy}
    found, *_ = answered(failing, lines, tmp_path, options, concurrency=2)
    assert {name for name, record in found.items() if record["error"]} == ended
    sentence = "line 2: RuntimeError: out of memory"
    assert said(found["bad"]) == {"code": "failed", "message": sentence, "line": 2}
    good = [request for request in lines if request["custom_id"] not in ended]
    expected, *_ = answered(failing, good, tmp_path, options, concurrency=2)
    assert {n: said(r) for n, r in expected.items()} == {n: said(found[n]) for n in expected}


def test_a_damaged_line_is_named_and_nothing_is_lost(failing, tmp_path):
    path = tmp_path / "a.jsonl"
    answered(failing, [ids("a"), ids("b")], tmp_path, {"policy": POLICY})
    whole = path.read_bytes()
    first, second, _ = whole.split(b"\n")
    for data, words in [
        (first[:90] + b"\n" + second + b"\n", "did not write it"),
        (first + b"\n" + second[:90] + b"\n" + second + b"\n", "line 2 is damaged: delete"),
        (whole + b"my notes", "line 3 is damaged"),
        (b"my notes", "did not write it"),
        (b"{}\n", "did not write it"),
        (json.dumps([1]).encode() + b"\n", "did not write it"),
    ]:
        path.write_bytes(data)
        with pytest.raises(SnapKVError, match=words):
            AnswersFile(path, "tiny", {})
        assert path.read_bytes() == data
    for rest in (b"", b'{"i', b"\0" * 4096, second[:-1], second):
        path.write_bytes(first + b"\n" + rest)
        with AnswersFile(path, "tiny", {}) as answers:
            assert (answers.n_answered, answers.n_errors) == (1, 0)
        assert path.read_bytes() == first + b"\n"


KEYDIFF = "keydiff:budget=64,block=64"
STAGES = f"{KEYDIFF} then {SNAPKV}"
SLIDES = "snapkv:budget=64,on_full=slide,n_sink=4,n_window=16,obs_window=16,lookahead=4"


def options_of(policy, **more):
    return {"policy": resolve_setting(policy=policy), "prefill_step_size": 512, **more}


EIGHT_BITS = options_of(f"{SNAPKV},on_full=grow", kv_bits=8, kv_group_size=32)
WAYS = [options_of(None), EIGHT_BITS, options_of(SLIDES), options_of(STAGES)]


def needed(loaded, options, n_prompt, max_tokens):
    return Memory(EntrySizes(loaded[0]), options, 1 << 60).need(n_prompt, max_tokens)


@pytest.mark.parametrize("options", WAYS)
def test_one_request_takes_the_planned_memory(demo_llama, tmp_path, options):
    request = text("a", 90, max_tokens=40, logit_bias={"2": -100})
    found, held, _ = answered(demo_llama, [request], tmp_path, options)
    n_prompt = found["a"]["response"]["body"]["usage"]["prompt_tokens"]
    assert held <= needed(demo_llama, options, n_prompt, 40).peak_entry_bytes < 2.2 * held


@pytest.mark.parametrize("options", WAYS[:3])  # two stages decode from the third kind of cache
def test_requests_wait_rather_than_exceed_the_limit(demo_llama, tmp_path, options):
    lines = [
        (chat if n % 3 else text)(f"{n}", 5 + 11 * n % 65, max_tokens=4 + 7 * n % 30)
        for n in range(10)
    ]
    most = [needed(demo_llama, options, *size).peak_entry_bytes for size in ((60, 10), (520, 33))]
    limit = int(1.8 * max(most))
    found, held, at_once = answered(demo_llama, lines, tmp_path, options, max_kv_bytes=limit)
    expected, _, more = answered(demo_llama, lines, tmp_path, options)
    assert held <= limit and 1 < at_once < more
    assert len(found) == len(lines) and not any(record["error"] for record in found.values())
    for name, record in found.items():
        assert answer(record) == answer(expected[name])


@pytest.mark.parametrize("store", ["memory", "8bit", "file"])
def test_the_planned_memory_of_sparse_requests_is_the_devices_memory(demo_llama, store):
    """The tolerance covers a step's temporary arrays, about 2 MB, and entries that are packed within a step."""
    options = options_of(Sparse(budget=256, store=store)) | {"prefill_step_size": 64}
    need = needed(demo_llama, options, 2000, 40)
    gc.collect()
    gc.freeze()  # makes each collection quick, because older objects are skipped
    before, taken = mx.get_active_memory(), []
    run = batch_helpers.Run(demo_llama[0], **options)
    run.insert(batch_helpers.prompts_of(2000), 40)
    while len(run.answers.get(0, [])) < 20:
        run.step()
        gc.collect()
        taken.append(mx.get_active_memory() - before)
    gc.unfreeze()
    assert 0.85 * need.peak_entry_bytes < max(taken) < need.peak_entry_bytes + 3_500_000
    planned = need.cache_bytes_at_end + need.extra_in_answer
    assert 0.9 * planned < taken[-1] < planned + 3_500_000  # a quantised store may have fewer rows


@pytest.mark.parametrize("read_top_k", [None, 64])
def test_the_index_and_means_of_a_sparse_request_are_counted(demo_llama, monkeypatch, read_top_k):
    """Caches store page means only if chunks choose pages."""
    exact_up_to(monkeypatch, 1000)
    sparse = Sparse(budget=256, read_top_k=read_top_k, store="file")
    options = options_of(sparse) | {"prefill_step_size": 64}
    run = batch_helpers.Run(demo_llama[0], **options)
    (uid,) = run.insert(batch_helpers.prompts_of(2000), 40)
    run.finish()
    caches, _ = run.read[uid]
    means = sum(cache.page_means.nbytes for cache in caches)
    indexed = sum(cache.index.codes.nbytes for cache in caches)
    assert (means > 0) == (read_top_k is not None)
    # Per token in three layers: the clusters of two heads, and 1/256 of a mean key and value.
    weighed = 2000 * 3 * (2 * 2 + 512 / 256)
    stays = needed(demo_llama, options, 2000, 40).extra_in_answer
    # The buffers of means may have free room.
    assert indexed + weighed + 0.8 * means <= stays < 1.1 * (indexed + weighed + means)
    assert needed(demo_llama, options, 900, 40).extra_in_answer <= weighed + means


def test_lines_may_have_fields_of_other_servers(demo_llama, tmp_path):
    """Unknown fields are ignored with a warning. max_tokens=-1 means no limit."""
    odd = [{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}]
    messages = [{"role": "user", "content": "The key"}, {"role": "tool", "content": odd}]
    lines = [
        line("odd", messages=messages, max_tokens=4.0, brand_new=1, user="me"),
        line("endless", COMPLETIONS, prompt="The key of", max_tokens=-1, stop=["."]),
        line("several", COMPLETIONS, prompt=["The key of", "The door"]),
    ]
    found, *_ = answered(demo_llama, lines, tmp_path, {"policy": None}, max_kv_bytes=1 << 30)
    body = found["odd"]["response"]["body"]
    assert body["usage"]["completion_tokens"] == 4
    assert [warning.split()[0] for warning in body["warnings"]] == ["a", "brand_new"]
    assert found["endless"]["response"]["body"]["choices"][0]["finish_reason"] == "stop"
    assert "prompt must be one text" in found["several"]["error"]["message"]
