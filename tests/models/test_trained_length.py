"""The length that a model says it was trained to."""

import pytest
from model_configs import make_model

from mlx_snapkv.models.rope import longest_trained_length, trained_length
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.policies import resolve_policy


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "scaling, length, longest",
    [
        ({"factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
        # LLaMA 3.2's, whose max_position_embeddings say all of it.
        (
            {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 512},
            4096,
            4096,
        ),
        ({"type": "linear", "factor": 8.0}, 4096, 32768),
        ({"rope_type": "linear", "factor": 8.0}, 4096, 32768),
        (
            {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 4096},
            8192,
            8192,
        ),
        ({"rope_type": "dynamic", "factor": 8.0}, 4096, 4096),
        ({"rope_type": "default"}, 4096, 4096),
        (None, 4096, 4096),
    ],
)
def test_the_length_that_a_configuration_tells(spelling, scaling, length, longest):
    model = make_model("llama")
    setattr(model.args, spelling, scaling)
    assert (trained_length(model), longest_trained_length(model)) == (length, longest)
    by_type = {"sliding_attention": {"rope_type": "default"}, "full_attention": scaling}
    setattr(model.args, spelling, by_type)
    assert (trained_length(model), longest_trained_length(model)) == (length, longest)
    assert trained_length(object()) is None and longest_trained_length(object()) is None


def test_where_a_linear_factor_leaves_the_length_open_positions_stay_up_to_the_longer_one():
    model = make_model("llama")
    model.args.max_position_embeddings = 100
    model.args.rope_scaling = {"rope_type": "linear", "factor": 3.0}
    policy = resolve_policy(policy="keydiff:budget=16,block=8,n_window=4")
    config, full = CompressionConfig(policy), CompressionConfig()
    assert config.warning(model, 100) is None is full.warning(model, 100)
    for each in (config, full):
        said = each.warning(model, 101)
        assert "more than the 100 of max_position_embeddings" in said and "length is 300" in said
        assert each.compaction(model, 300) is None and each.warning(model, 300)
    assert config.compaction(model, 301).length == 300 and config.warning(model, 301) is None
    assert "more than the model's trained length of 300" in full.warning(model, 301)
    assert CompressionConfig(policy, far="pull").compaction(model, 101).length == 300
