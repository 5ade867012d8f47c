"""`attend` and `merge` on a CPU, against a float64 softmax over the items that a token reads."""

import mlx.core as mx
import pytest
from kernel_cases import TOKENS, TOLERANCES, VARIANTS, Token

from mlx_snapkv.sparse.kernels import launch


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", TOKENS)
def test_attention_equals_float64(shim, variant, case):
    token = Token(variant, **TOKENS[case])
    assert token.difference() < TOLERANCES[variant[2]]
    assert [launched.name for launched in shim.launches] == ["attend", "merge"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_split_may_have_several_blocks(shim, variant, monkeypatch):
    monkeypatch.setattr(launch, "MAX_SPLITS", 2)
    assert Token(variant, n_chosen=517).difference() < TOLERANCES[variant[2]]
    assert shim.launches[0].groups == (2, 2)


def test_a_split_may_have_no_items(shim, monkeypatch):
    split = launch._divide_into_splits
    monkeypatch.setattr(launch, "_divide_into_splits", lambda n: (split(n)[0], split(n)[1] + 1))
    assert Token(VARIANTS[1]).difference() < TOLERANCES[mx.float16]


@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_one_entry_may_get_nearly_all_attention(shim, variant):
    token = Token(variant)
    token.prompt[0][0, 0, token.positions[0, 0, 60]] = 40 * token.queries[0, 0, 0]
    assert token.difference() < TOLERANCES[variant[2]]


@pytest.mark.parametrize("variant", VARIANTS[:3])
@pytest.mark.parametrize("value", [-mx.inf, mx.nan])
def test_infinite_and_nan_logits_give_float64s_result(shim, variant, value):
    token = Token(variant)
    key = mx.zeros_like(token.queries[0, 0, 0])
    key[0] = mx.sign(token.queries[0, 0, 0, 0]) * value  # only for query head 0
    token.prompt[0][0, 0, token.positions[0, 0, 0]] = key
    assert token.difference() < TOLERANCES[variant[2]]


def test_all_entries_may_be_in_one_buffer(shim):
    token = Token(VARIANTS[0], n_own=0)
    one = token.attention()
    token.answer = token.prompt
    assert mx.array_equal(one, token.attention())
