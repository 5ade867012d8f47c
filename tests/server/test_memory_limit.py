"""Without --max-kv-bytes, the machine's memory limits what requests and prefixes take together."""

import mlx.core as mx
import pytest
from bad_requests import TEXT
from model_configs import REFUSED_CONFIGS, make_model
from server_helpers import serving

from mlx_snapkv.batch.memory import Memory, NeverFits
from mlx_snapkv.planning import kv_limit
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.entry_sizes import EntrySizes, weight_bytes
from mlx_snapkv.planning.footprint import Footprint
from mlx_snapkv.planning.kv_limit import machine_kv_limit
from mlx_snapkv.planning.machine import Machine
from mlx_snapkv.server.admission import Limits

ENTRY_BYTES = 3072  # the entries of one token in the demo model


def let_machine_have(monkeypatch, usable):
    monkeypatch.setattr(kv_limit, "this_machine", lambda: Machine(usable, usable))


def let_limit_be(monkeypatch, model, limit):
    """Make this machine have `limit` bytes of KV memory in addition to the model."""
    much = 1 << 40
    let_machine_have(monkeypatch, much)
    taken = machine_room(much) - machine_kv_limit(Footprint(EntrySizes(model), CompressionConfig()))
    let_machine_have(monkeypatch, (limit + taken) * 16 // 15)


def machine_room(usable):
    return Machine(usable, usable).without_buffers


def test_a_request_of_3_gb_never_starts_on_a_machine_with_2_gb(demo_llama, monkeypatch):
    model = demo_llama[0]
    let_machine_have(monkeypatch, 2 << 30)
    memory = Memory(EntrySizes(model), {}, None)
    margin = (2 << 30) - weight_bytes(model) - memory.limit
    assert 128 << 20 < margin < 1 << 30
    with pytest.raises(NeverFits, match=r"and this machine has [\d.]+ GB; .* would fit"):
        memory.need((3 << 30) // ENTRY_BYTES, 100)
    half = memory.need(int(0.6 * memory.limit) // ENTRY_BYTES, 100)

    class Running:
        need, report = half, None

    assert memory.admit(half, [], 0) is not None
    assert memory.admit(half, [Running], 0) is None  # it waits


def test_a_long_answer_is_reserved_as_far_as_the_machine_goes(demo_llama, monkeypatch):
    let_limit_be(monkeypatch, demo_llama[0], 20_000_000)
    memory = Memory(EntrySizes(demo_llama[0]), {}, None)
    assert memory.longest_answer(100, 50) == 50
    n = memory.longest_answer(100, 1 << 20)
    assert 2048 < n < 1 << 20 and memory.need(100, n).peak_entry_bytes <= memory.limit
    given = Memory(EntrySizes(demo_llama[0]), {}, 20_000_000)
    assert given.longest_answer(100, 1 << 20) == 1 << 20


def test_a_model_without_sparse_attention_is_advised_a_shorter_prompt():
    """The error is about memory, and does not suggest a setting that the model does not support."""
    model = make_model("deepseek_v32", REFUSED_CONFIGS["deepseek_v32"])
    whole = Memory(EntrySizes(model), {}, 1 << 40).need(4000, 10)
    memory = Memory(EntrySizes(model), {}, whole.peak_entry_bytes - 1)
    with pytest.raises(NeverFits, match=r"raise it; a prompt of 3,\d+ tokens would fit$"):
        memory.need(4000, 10)


def test_a_short_prompt_with_a_long_answer_is_advised_a_shorter_answer(demo_llama):
    whole = Memory(EntrySizes(demo_llama[0]), {}, 1 << 40).need(4, 3000)
    memory = Memory(EntrySizes(demo_llama[0]), {}, whole.peak_entry_bytes)
    with pytest.raises(NeverFits, match=r"raise it; an answer of 3,\d+ tokens would fit"):
        memory.need(4, 4000)


def test_a_server_refuses_a_prompt_that_its_machine_can_not_hold(demo_llama, monkeypatch):
    let_limit_be(monkeypatch, demo_llama[0], 8_000_000)
    with serving(policy=None, limits=Limits()) as served:
        long = {"prompt": "The key of " * 1500, "max_tokens": 4}
        response = served.post(TEXT, long)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("prompt is too long: its ")
        assert "this machine has 8 MB; " in response.text and "would fit" in response.text
        held = []
        for word in ("key", "door", "lock", "oak"):
            body = {"prompt": f"{word} " * 700, "max_tokens": 20}
            assert served.post(TEXT, body).status_code == 200
            held.append(served.engine.loaded.prefixes.nbytes)
            mx.synchronize()
        assert 0 < max(held) <= 8_000_000
        assert len(held) * held[0] > 8_000_000  # prefixes were evicted
    with serving(policy=None, limits=Limits(kv_bytes=0)) as served:
        assert served.post(TEXT, long).status_code == 200
