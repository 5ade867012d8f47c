"""A decoded token launches few operations, at most one sort per layer, and never waits, however long the text."""

import pytest
from count_operations import contenders, count_token
from tiny_models import make_llama

# For the full cache, SnapKV, sparse attention without the residual and with it.
MORE = [0, 0, 18, 30]  # operations beyond the full cache's
SORTS = [0, 0, 1, 1]


@pytest.mark.parametrize("n", [4096, 12288], ids=["exact", "by the index"])
def test_operations_sorts_and_waits(n):
    model = make_llama(num_hidden_layers=1)
    full, *_ = found = [count_token(model, contender, n) for contender in contenders(n)]
    n_full = full.operations.total()
    assert n_full > 20  # the counting works
    assert all(x.operations.total() <= n_full + more for x, more in zip(found, MORE, strict=True))
    assert [x.sorts for x in found] == SORTS
    assert not any(x.waits for x in found)
