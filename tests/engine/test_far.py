"""Policies with prompts longer than a model says it was trained to."""

import mlx.core as mx
import pytest
from far_helpers import LENGTH, asked, short_model
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model

from mlx_snapkv import Conversation, SnapKVError, generate_step, prefill
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.policies import resolve_policy

READ = "keydiff:budget=96,block=128,n_sink=4,n_window=32"
THEN = f"{READ} then snapkv:top_k=60,n_sink=4,n_window=32,obs_window=32,pool=avg,pool_kernel=21"


@pytest.fixture(scope="module")
def short():
    return short_model("demo")


def held_with_true_rotations(conversation):
    """The first layer's entries, whose keys tell of nothing but their token: turned to where the cache says."""
    model, prompt_cache = conversation.model, conversation.prompt_cache
    layer = attention_layers(model, prompt_cache)[0]
    held = layer.cache_in(prompt_cache).held()
    caches = make_prompt_cache(model)
    model(mx.array(conversation.read)[None], cache=caches)
    keys = mx.take_along_axis(caches[0].keys, held.positions[..., None], axis=2)
    steps = held.rotations.astype(mx.int32) - held.positions.astype(mx.int32)
    assert mx.allclose(layer.turn(keys, steps), held.keys, atol=2e-3).item()
    return held


@pytest.mark.parametrize("policy", [READ, THEN, "h2o:budget=96,block=128", f"{THEN},on_full=grow"])
def test_without_a_memory(short, policy):
    conversation, _ = asked(*short, 1500, 2, policy=policy)
    assert conversation.report.pulled_to == LENGTH
    held = held_with_true_rotations(conversation)
    assert len(conversation.read) - held.rotations.min().item() <= LENGTH
    assert held.positions.min().item() < held.rotations.min().item()


def test_streaming_llm_has_the_papers_positions(short):
    conversation, _ = asked(*short, 1500, 2, policy="streaming_llm:budget=96,block=64")
    held = held_with_true_rotations(conversation)
    n, end = len(held), len(conversation.read)
    assert held.rotations.tolist() == [[list(range(end - n, end))] * 2]
    assert held.positions[..., :4].tolist() == [[[0, 1, 2, 3]] * 2]


@pytest.mark.parametrize(
    "sentence, options",
    [
        ("a policy that evicts while a prompt is read", {"policy": "snapkv:top_k=60"}),
        ("needs sparse attention", {"sparse": "read=dense"}),
        ("no policy was given", {}),
        ("far must be keep or pull, got 'yes'", {"far": "yes"}),
    ],
)
def test_refused_by_name(short, sentence, options):
    with pytest.raises(SnapKVError, match=sentence):
        generate_step(mx.arange(5), short[0], **{"far": "pull"} | options)


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("gpt2", "'gpt2' has no max_position_embeddings"),
        ("nemotron_h", "the keys of model type 'nemotron_h' have no RoPE"),
        ("hunyuan_v1_dense", "the keys of model type 'hunyuan_v1_dense' can't be rotated twice"),
    ],
)
def test_models_that_cant_are_refused_by_name(name, sentence):
    model, tokens = make_model(name), mx.arange(1, 60)
    with pytest.raises(SnapKVError, match=sentence):
        prefill(model, tokens, READ, far="pull")
    policy = resolve_policy(policy="keydiff:budget=16,block=8,n_window=4")
    assert CompressionConfig(policy).compaction(model, 10_000) is None


@pytest.mark.parametrize("policy", [READ, THEN])
def test_a_saved_conversation_goes_on_as_it_was_pulled(short, policy, tmp_path):
    conversation, _ = asked(*short, 1500, 2, policy=policy)
    conversation.save(tmp_path / "chat.safetensors")
    loaded = Conversation.load(tmp_path / "chat.safetensors", *short, max_tokens=12)
    caches = zip(loaded.prompt_cache, conversation.prompt_cache)
    assert all(mine.compaction == theirs.compaction for mine, theirs in caches)
    mine, theirs = (list(c.send("And what is it?"))[-1] for c in (loaded, conversation))
    assert mine.token == theirs.token and mx.array_equal(mine.logprobs, theirs.logprobs)


def test_positions_stay_or_are_compacted_as_far_says(short):
    model, tokens = short[0], mx.arange(800) % 300
    for n, far, pulled in ((800, "keep", None), (800, None, LENGTH), (400, None, None)):
        _, report = prefill(model, tokens[:n], READ, far=far)
        assert report.compressed and report.pulled_to == pulled
    cache, _ = prefill(model, tokens[:400], READ, far="pull")
    assert all(c.compaction.length == LENGTH for c in cache)
