import importlib
import inspect

import pytest
from batch_helpers import alone
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tiny_models import make_llama

from mlx_snapkv import SnapKVCache, SnapKVError, batch_generate, generate
from mlx_snapkv.batch.generator import CompressedBatchGenerator, PromptBatch
from mlx_snapkv.batch.groups import Groups

mlx_generate = importlib.import_module("mlx_lm.generate")
POLICY = (
    "snapkv:budget=12.5%,n_sink=4,n_window=32,obs_window=32,min_ctx=512,lookahead=4,on_full=slide"
)


@pytest.fixture(scope="module")
def asked(demo_llama, ask):
    _, tokenizer = demo_llama
    return [ask(tokenizer, n, seed=n) for n in (600, 300, 900, 700)]


def test_every_prompt_is_answered_as_by_itself(demo_llama, asked):
    model, tokenizer = demo_llama
    reports = []
    response = batch_generate(
        model,
        tokenizer,
        [prompt for prompt, _ in asked],
        max_tokens=[20, 10, 20, 2],
        policy=POLICY,
        on_report=reports.append,
        return_prompt_caches=True,
        return_token_ids=True,
        return_logprobs=True,
    )
    for i, ((prompt, _), n) in enumerate(zip(asked, (20, 10, 20, 2))):
        answer = generate(model, tokenizer, prompt, max_tokens=n, policy=POLICY)
        assert response.texts[i].strip() == answer
        assert len(response.logprobs[i]) == len(response.token_ids[i]) > 0
        assert all(-1 < p <= 0 for p in response.logprobs[i])
    assert [report.prompt_tokens for report in reports] == [len(prompt) for prompt, _ in asked]
    assert [report.compressed for report in reports] == [True, False, True, True]
    assert response.errors == [None] * 4
    assert isinstance(response.caches[0][0], SnapKVCache)
    assert isinstance(response.caches[1][0], KVCache)
    assert response.stats.generation_tokens >= sum(map(len, response.token_ids))
    # A returned cache can be continued.
    more = tokenizer.encode("And then?", add_special_tokens=False)
    assert len(alone(model, more, 5, prompt_cache=response.caches[0])) == 5


def test_without_a_policy_answers_equal_mlx_lms_batch_generate(demo_llama, asked, capsys):
    prompts, reports = [prompt for prompt, _ in asked[:2]], []
    wanted, found = (
        batch(*demo_llama, prompts, max_tokens=5, return_token_ids=True, **more)
        for batch, more in (
            (mlx_generate.batch_generate, {}),
            (batch_generate, {"on_report": reports.append}),
        )
    )
    assert (found.texts, found.token_ids) == (wanted.texts, wanted.token_ids)
    assert [report.compressed for report in reports] == [False, False]
    batch_generate(*demo_llama, prompts, max_tokens=3, policy=POLICY, verbose=True)
    assert "2 of 2 prompts answered" in capsys.readouterr().out


def test_a_failed_prompt_is_not_counted_as_answered(demo_llama, asked, capsys):
    prompts = [prompt for prompt, _ in asked[:2]]
    caches = [None, make_prompt_cache(make_llama(num_hidden_layers=1))]  # one of another model
    options = {"max_tokens": 2, "policy": "keydiff:budget=4000", "verbose": True}
    response = batch_generate(*demo_llama, prompts, caches, **options)
    assert [error is None for error in response.errors] == [True, False]
    assert "1 of 2 prompts answered" in capsys.readouterr().out


def test_empty_prompts_and_conflicting_options_are_refused(demo_llama):
    with pytest.raises(SnapKVError, match="prompt 1 is empty"):
        batch_generate(*demo_llama, [[1, 2], []], policy=POLICY)
    with pytest.raises(SnapKVError, match="both"):
        batch_generate(*demo_llama, [[1, 2]], policy=POLICY, snapkv="top_k=5")


def test_mlx_lm_has_the_hooks_that_batches_depend_on():
    """If an mlx-lm upgrade changes a hook, this test should fail rather than an answer."""
    ours = inspect.signature(batch_generate).parameters
    theirs = inspect.signature(mlx_generate.batch_generate).parameters
    assert list(theirs)[:-1] == list(ours)[: len(theirs) - 1]
    assert all(ours[name].default == theirs[name].default for name in list(theirs)[3:-1])
    mine, its = (
        list(inspect.signature(cls.insert_segments).parameters)
        for cls in (CompressedBatchGenerator, mlx_generate.BatchGenerator)
    )
    assert mine == [*its, "in_full"]
    step = inspect.getsource(mlx_generate.BatchGenerator._next)
    for used in ("self._prompt_batch.extend(self._make_batch(n))", "self._generation_batch.next()",
                 "self._prompt_batch.split(split).generate(last_inputs)", "self._prompt_batch.prompt(prompts)",
                 "self._generation_batch.extend(gen_batch)", "self.prefill_step_size"):  # fmt: skip
        assert used in step
    for name in ("extend", "split", "filter", "prompt", "generate", "extract_cache"):
        assert name in vars(mlx_generate.PromptProcessingBatch) and name in vars(PromptBatch)
    for name in ("extend", "next", "filter", "extract_cache", "__len__"):
        assert name in vars(mlx_generate.GenerationBatch) and name in vars(Groups)
    wanted = "self model uids inputs prompt_cache tokens samplers fallback_sampler logits_processors stop_sequences"
    found = inspect.signature(mlx_generate.GenerationBatch.__init__).parameters
    assert list(found) == [*wanted.split(), "max_tokens"]
