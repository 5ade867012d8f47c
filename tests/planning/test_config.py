"""mlx-lm options that conflict with a setting are rejected in one sentence, when it is chosen or about to compress."""

import re
import shlex

import pytest
from request_helpers import assert_same, plain, steps

from mlx_snapkv import SnapKVError, Sparse
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.settings import setting_named


def made(method, **options):
    config, _ = CompressionConfig.from_keywords({"policy": setting_named(method), **options})
    return config


@pytest.mark.parametrize(
    "method, options, sentence",
    [
        ("snapkv", {"max_kv_size": 9}, "max_kv_size can't be combined with a policy or sparse attention: drop one"),
        ("sparse", {"max_kv_size": 9}, "max_kv_size can't be combined with a policy or sparse attention: drop one"),
        ("snapkv", {"kv_bits": 4, "draft_model": object()}, "can't check quantised entries exactly: drop kv_bits"),
        ("h2o", {"draft_model": object()}, "h2o goes on evicting: use snapkv with on_full=grow, or drop draft_model"),
    ],
)  # fmt: skip
def test_options_that_exclude_a_compression_are_refused_only_when_a_prompt_is_compressed(
    method, options, sentence
):
    config = made(method, **options)
    with pytest.raises(SnapKVError, match=re.escape(sentence)):
        config.require_compressible()


def test_options_that_exclude_nothing_are_not_refused():
    made("snapkv", draft_model=object()).require_compressible()
    made("h2o", kv_bits=4).require_compressible()
    made("sparse").require_compressible()


@pytest.mark.parametrize("method", [{"policy": "snapkv:budget=300"}, {"sparse": "budget=300"}])
def test_a_prompt_that_is_not_compressed_may_have_a_rotating_cache(tiny_model, tokens, method):
    found = steps(tiny_model, tokens, max_kv_size=64, **method)
    assert_same(found, plain(tiny_model, tokens, max_kv_size=64))


@pytest.mark.parametrize("text", ["sparse", "sparse:budget=6.25%,store=8bit", "sparse:read=sparse"])
def test_printed_flags_select_the_same_setting(text):
    config = CompressionConfig(setting_named(text))
    flag, options = shlex.split(config.flags)
    assert flag == "--sparse" and Sparse.from_string(options) == config.sparse
