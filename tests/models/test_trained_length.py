"""The trained length in a model's configuration, and the warning for longer prompts."""

import warnings

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model
from tiny_models import make_llama

from mlx_snapkv import batch_generate, generate_step, prefill
from mlx_snapkv.errors import TrainedLengthWarning
from mlx_snapkv.models.trained_length import beyond_trained_length, trained_length


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "scaling, length",
    [
        ({"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        # LLaMA 3.2's max_position_embeddings is the length after scaling.
        (
            {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 512},
            4096,
        ),
        ({"type": "linear", "factor": 8.0}, 4096),
        ({"rope_type": "linear", "factor": 8.0}, 4096),
        (
            {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 4096},
            8192,
        ),
        ({"rope_type": "dynamic", "factor": 8.0}, 4096),
        ({"rope_type": "default"}, 4096),
        (None, 4096),
    ],
)
def test_the_trained_length_follows_from_the_configuration(spelling, scaling, length):
    model = make_model("llama")
    setattr(model.args, spelling, scaling)
    assert trained_length(model) == length
    by_type = {"sliding_attention": {"rope_type": "default"}, "full_attention": scaling}
    setattr(model.args, spelling, by_type)
    assert trained_length(model) == length
    assert trained_length(object()) is None


LENGTH = 100


@pytest.fixture
def short():
    """Return a model that was trained on up to `LENGTH` tokens."""
    model = make_llama()
    model.args.max_position_embeddings = LENGTH
    return model


def test_only_a_prompt_beyond_the_trained_length_gets_a_warning(short):
    assert beyond_trained_length(short, LENGTH) is None
    said = beyond_trained_length(short, LENGTH + 1)
    assert said.startswith("101 tokens are more than the model's trained length of 100:")
    assert "rope_scaling" in said and "YaRN" in said
    del short.args.max_position_embeddings
    assert beyond_trained_length(short, 10**9) is None


WAYS = {
    "full cache": {},
    "policy": {"policy": "keydiff:budget=16,block=8,n_window=4"},
    "sparse": {"sparse": "budget=32,n_sink=4,n_window=8"},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_request_warns_once_before_the_model_runs(short, options):
    with pytest.warns(TrainedLengthWarning, match="101 tokens are more") as found:
        tokens = generate_step(mx.arange(LENGTH + 1) % 50, short, max_tokens=2, **options)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(tokens)) == 2
        list(generate_step(mx.arange(LENGTH) % 50, short, max_tokens=2, **options))
        list(generate_step(mx.arange(200) % 50, short, max_tokens=2, max_kv_size=16))


def test_tokens_of_earlier_turns_count(short):
    cache = make_prompt_cache(short)
    # mlx-lm also reads the one token of the answer.
    list(generate_step(mx.arange(90) % 50, short, max_tokens=1, prompt_cache=cache))
    with pytest.warns(TrainedLengthWarning, match="111 tokens are more"):
        list(generate_step(mx.arange(20), short, max_tokens=1, prompt_cache=cache))


def test_a_text_and_a_batch_warn_once(short, demo_llama):
    with pytest.warns(TrainedLengthWarning, match="150 tokens") as found:
        prefill(short, mx.arange(150) % 50, WAYS["policy"]["policy"])
    assert len(found) == 1
    prompts = [[5] * 40, [6] * 120]
    for options in (WAYS["full cache"], WAYS["policy"]):
        with pytest.warns(TrainedLengthWarning, match="120 tokens") as found:
            batch_generate(short, demo_llama[1], prompts, max_tokens=1, **options)
        assert len(found) == 1
