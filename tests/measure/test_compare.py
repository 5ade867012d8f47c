"""Several methods sharing one prefill: answers equal those of `generate`, and KL equals `eval fidelity`'s."""

import random

import pytest

from mlx_snapkv import Sparse, generate
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.measure.compare import compare
from mlx_snapkv.measure.divergence import Reference
from mlx_snapkv.measure.fidelity import KNOWN, judge, read_piece
from mlx_snapkv.measure.methods import Method
from mlx_snapkv.measure.reading import read_once
from mlx_snapkv.measure.texts import Frame, Piece
from mlx_snapkv.planning.settings import resolve_compress

POLICIES = [
    "snapkv:budget=60,n_window=16,lookahead=0",
    "streaming_llm:budget=60,schedule=once",
    "keydiff:budget=60,block=64",
    "keydiff:budget=80,block=64 then snapkv:budget=60,lookahead=4",
    "h2o:budget=60,schedule=once",
    "streaming_llm:budget=16,block=32",  # its first token is another one than the full cache's
]
N = 12
SPARSE = Sparse(budget=60, n_window=16, read_top_k=64, when="always")


@pytest.fixture(scope="module")
def compared(demo_llama, ask):
    """Return the prompt, and each method with its answer. The first method is the full cache."""
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 600, 0)
    policies = [resolve_compress(policy=text) for text in POLICIES]
    methods = [Method(), *map(Method, policies), Method(SPARSE)]
    return prompt, [*zip(methods, compare(model, tokenizer, prompt, methods, N))]


def test_answers_equal_generates_answers_and_differences_are_reported(demo_llama, compared):
    prompt, found = compared
    full = found[0][1]
    for method, answer in found:
        text = generate(*demo_llama, prompt, max_tokens=N, policy=method.policy)
        assert answer.text == text, method.name
        assert method.policy is None or answer.entries < len(prompt)
        assert (answer.differs is None) == (answer.tokens == full.tokens)
    other = next(answer for _, answer in found if answer.differs is not None)
    n, before, theirs, ours = other.differs
    assert full.tokens[:n] == other.tokens[:n] and theirs != ours
    assert full.text.startswith(before.lstrip()) or n > 8
    assert other.kept.shape == (len(prompt),) and 0 < other.kept.mean() < 0.3


def test_kl_equals_the_kl_of_fidelity(demo_llama, compared):
    model, tokenizer = demo_llama
    prompt, found = compared
    policies = [method.policy for method, _ in found if method.policy != SPARSE]
    piece, frame = Piece("", 1, prompt[:-20], []), Frame([], [], prompt[-20:])
    read = read_piece(model, piece, frame, policies, {KNOWN}, N, tokenizer.eos_token_ids)[KNOWN]
    for policy, (method, answer) in zip(policies, found):
        record = judge(KNOWN, *read, policy)
        assert answer.kl == pytest.approx(float(record["kl"]), abs=1e-4), method.name
    assert found[len(POLICIES)][1].tokens[0] != found[0][1].tokens[0]
    assert found[0][1].kl == 0 and max(answer.kl for _, answer in found) > 0.1
    (sparse,) = (answer.kl for method, answer in found if method.policy == SPARSE)
    assert sparse == pytest.approx(float(judge(KNOWN, *read, SPARSE)["kl"]), abs=1e-4)


@pytest.mark.parametrize("before", ["", "keydiff:budget=200,block=64 then "])
def test_an_answer_that_ends_before_the_compression_has_no_kl(demo_llama, ask, before):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 300, 0)
    policies = (f"{before}snapkv:budget=60,n_window=16,lookahead={n}" for n in (16, 0))
    methods = [Method(), *(Method(resolve_compress(policy=policy)) for policy in policies)]
    full, ahead, none = compare(model, tokenizer, prompt, methods, 8)
    assert (ahead.kl, ahead.n_before) == (None, 17) and ahead.text == full.text
    said = f"the answer has {len(full.tokens)} tokens, and the first 17 are decoded before"
    assert ahead.uncompressed == f"not compressed yet: {said} the compression"
    assert none.kl > 0 and none.n_before == 2 and none.uncompressed is None
    *_, alone = compare(model, tokenizer, prompt, methods, 2)
    assert "has 2 tokens, and the first 2 are decoded" in alone.uncompressed


def test_a_prompt_that_fits_the_budget_has_the_full_caches_answer(demo_llama, ask):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 200, 1)
    methods = [Method(), Method(resolve_compress(policy="snapkv:top_k=4096"))]
    full, other = compare(model, tokenizer, prompt, methods, 4)
    assert "fit the budget" in other.reason and (full.text, full.kl) == (other.text, other.kl)


def test_sparse_attentions_kl_is_measured_on_tokens_that_choose(demo_llama):
    """After the prompt, the cache has all entries, and would predict the same as the full cache."""
    model, tokenizer = demo_llama
    text, _ = make_haystack(tokenizer, random.Random(0), 3, 500)
    prompt = tokenizer.encode(text)[:400]
    sparse = Sparse(budget=8, n_sink=2, n_window=2, residual=None, when="always")
    full, *found = compare(model, tokenizer, prompt, [Method(), Method(sparse)], 40)
    reference = Reference(read_once(model, prompt), full.tokens)
    kl = float(reference.kl_and_same(reference.generate(sparse))["kl"])
    assert kl > 1e-5 and [answer.kl for answer in found] == [pytest.approx(kl, rel=1e-3)]
