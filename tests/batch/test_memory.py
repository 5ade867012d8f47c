"""What requests are said to take, against the arrays."""

import gc

import batch_helpers
import mlx.core as mx
import pytest
from batch_file_helpers import SNAPKV, answer, chat, read, text, write

from mlx_snapkv import SnapKVError
from mlx_snapkv.batch.files import AnswersFile, RequestsFile
from mlx_snapkv.batch.memory import Memory
from mlx_snapkv.batch.run import Run
from mlx_snapkv.policies import resolve_policy

PYRAMID = "snapkv:budget=pyramid:64,n_sink=4,n_window=16,obs_window=16,lookahead=4"
KEYDIFF = "keydiff:budget=64,block=64"
WAYS = [
    (None, None),
    (f"{SNAPKV},on_full=grow", 8),
    (PYRAMID, None),
    (f"{KEYDIFF} then {SNAPKV}", None),
]


def options_of(policy, bits):
    options = {"policy": resolve_policy(policy=policy), "prefill_step_size": 512}
    return options | ({"kv_bits": bits, "kv_group_size": 32} if bits else {})


def answered(loaded, policy, bits, lines, folder, limit=None):
    """The most bytes and the most requests at once, seen after every step, and the records."""
    path, seen, about = folder / "a.jsonl", [], {"policy": policy}
    path.unlink(missing_ok=True)
    answers = AnswersFile(path, {})
    run = Run(*loaded, answers, options_of(policy, bits), "demo", about, max_kv_bytes=limit)

    def look(progress):
        seen.append((run._generator.prompt_cache_nbytes, len(run._active)))

    run.on_progress = look
    with answers, write(folder / "r.jsonl", lines).open("rb") as stream:
        run.answer(RequestsFile(stream))
    held, at_once = zip(*seen)
    return max(held), max(at_once), read(path)


def needed(loaded, policy, bits, n_prompt, max_tokens):
    memory = Memory(loaded[0], options_of(policy, bits), 1 << 60)
    return memory.need(n_prompt, max_tokens).most


@pytest.mark.parametrize("policy, bits", WAYS)
def test_one_request_takes_what_is_said(demo_llama, tmp_path, policy, bits):
    request = text("a", 90, max_tokens=40, logit_bias={"2": -100})
    held, _, found = answered(demo_llama, policy, bits, [request], tmp_path)
    n_prompt = found["a"]["response"]["body"]["usage"]["prompt_tokens"]
    assert held <= needed(demo_llama, policy, bits, n_prompt, 40) < 2.2 * held


@pytest.mark.parametrize("policy, bits", WAYS)
def test_requests_wait_rather_than_exceed_the_limit(demo_llama, tmp_path, policy, bits):
    lines = [
        (chat if n % 3 else text)(f"{n}", 5 + 11 * n % 65, max_tokens=4 + 7 * n % 30)
        for n in range(14)
    ]
    most = [needed(demo_llama, policy, bits, *size) for size in ((60, 10), (520, 33))]
    limit = int(1.8 * max(most))
    held, at_once, found = answered(demo_llama, policy, bits, lines, tmp_path, limit)
    _, more, expected = answered(demo_llama, policy, bits, lines, tmp_path)
    assert held <= limit and 1 < at_once < more
    assert not [record["error"] for record in found.values() if record["error"]]
    assert len(found) == 14
    for name, record in found.items():
        assert answer(record) == answer(expected[name])


@pytest.mark.parametrize("policy", [SNAPKV, f"{KEYDIFF} then {SNAPKV}"])
@pytest.mark.parametrize("memory", ["recall", "recall:4bit", "recall:file"])
def test_what_recalled_requests_take_is_the_devices_memory(demo_llama, policy, memory):
    """Up to what a step of this model takes beside, about 2 MB."""
    options = options_of(policy, None) | {"prefill_step_size": 64, "memory": memory}
    need = Memory(demo_llama[0], options, 1 << 60).need(2000, 40)
    gc.collect()
    before, taken = mx.get_active_memory(), []
    run = batch_helpers.Run(demo_llama[0], **options)
    run.insert(batch_helpers.prompts_of(2000), 40)
    while len(run.answers.get(0, [])) < 20:
        run.step()
        gc.collect()
        taken.append(mx.get_active_memory() - before)
    assert need.most - 100_000 < max(taken) < need.most + 3_500_000
    assert need.held + need.stays < taken[-1] < need.held + need.stays + 3_500_000


def test_one_that_never_fits_says_what_it_needs(demo_llama):
    memory = Memory(demo_llama[0], {}, 10_000_000)
    layers = 3 * 2 * 2 * 64 * 4  # layers, keys and values, heads, their size, bytes
    with pytest.raises(SnapKVError, match=r"need ([\d.]+) MB") as raised:
        memory.need(10_000, 100)
    told = float(str(raised.value).partition("need ")[2].split()[0])
    assert told == pytest.approx(10_100 * layers / 1e6, rel=0.05)
    assert str(raised.value).endswith("max_kv_bytes is 10 MB: raise it")
    memory.need(700, 300)
