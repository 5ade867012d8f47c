import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from training_batches import ANSWER, COPY, Mix, SequenceMaker
from training_tokenizer import train_tokenizer

from mlx_snapkv.demo import MODELS
from scripts import training_quick_exp as quick_exp

TARGET = mx.array([3, 0, 7])
PAIRS = {
    "swiglu": (quick_exp.swiglu, llama.swiglu, (6, 40), (6, 40)),
    "cross-entropy": (
        lambda x, _: quick_exp.cross_entropy(x, TARGET),
        lambda x, _: nn.losses.cross_entropy(x, TARGET),
        (3, 9),
        (1,),
    ),
    "attention with a cache": (
        lambda q, k: quick_exp.attention(q, k, k, scale=0.3, mask="causal"),
        lambda q, k: mx.fast.scaled_dot_product_attention(q, k, k, scale=0.3, mask="causal"),
        (2, 4, 3, 8),
        (2, 2, 7, 8),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_equal_mlxs(name):
    quick, own, *shapes = PAIRS[name]
    mx.random.seed(0)
    inputs = [mx.random.normal(shape) for shape in shapes]

    def value_and_gradients(function):
        def total(*args):
            return function(*args).square().sum()

        return [function(*inputs), *mx.grad(total, argnums=(0, 1))(*inputs)]

    for one, other in zip(value_and_gradients(quick), value_and_gradients(own), strict=True):
        assert mx.abs(one - other).max() <= 1e-4 * mx.abs(other).max()


def test_mlx_lms_attention_is_restored_after_the_block():
    own = llama.scaled_dot_product_attention
    with quick_exp.quick_llama():
        assert llama.scaled_dot_product_attention is quick_exp.attention
    assert llama.scaled_dot_product_attention is own


def test_the_seed_gives_the_shipped_tokenizer_and_sequences_follow_their_mix():
    tokenizer = train_tokenizer(1)
    shipped = (MODELS["demo"] / "tokenizer.json").read_text(encoding="utf-8")
    assert tokenizer.to_str() == shipped
    maker = SequenceMaker(tokenizer, 1)
    for mix, kind in ((Mix(300, facts=20, copy=0.0), ANSWER), (Mix(300, facts=20, copy=1.0), COPY)):
        ids, labels = maker.batch(mix, 1200)
        assert ids.shape == labels.shape and len(ids) == 4
        assert 250 < ids.shape[1] <= 340 and (labels == kind).any()
        assert not (labels == (ANSWER + COPY - kind)).any()
