"""lm-evaluation-harness' tasks on the embedded model: mlx-lm's own figures, and what a policy makes of them."""

import inspect
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs pip install -e '.[dev]'")

import lm_eval.tasks
from evaluation import lm as harness
from evaluation.lm import PolicyLM, load_tasks, run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_tasks import N, write_tasks
from mlx_lm import evaluate as mlx_evaluate

from mlx_snapkv import prefill
from mlx_snapkv.batch.generate import batch_generate
from mlx_snapkv.demo import MODELS
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.methods import Method
from mlx_snapkv.measure.records import Results
from mlx_snapkv.policies import resolve_policy

SNAPKV = resolve_policy(policy="snapkv:budget=25%,n_sink=4,n_window=32,min_ctx=0,lookahead=2")
STREAMING = resolve_policy(policy="streaming_llm:budget=25%")


@pytest.fixture(scope="module")
def folder(demo_llama, tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), demo_llama[1])


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch):
    """Only the tasks of these tests: an index of lm-evaluation-harness' own takes seconds each time."""
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def lm_of(demo_llama):
    return partial(PolicyLM, *demo_llama, use_chat_template=True, batch_size=2)


@pytest.fixture(scope="module")
def theirs(demo_llama):
    """mlx-lm's own `MLXLM`, of the same weights."""
    made = mlx_evaluate.MLXLM(str(MODELS["demo"]), batch_size=2)
    made._model = demo_llama[0]
    return made


def request(*args):
    """All that mlx-lm asks of a request."""
    return SimpleNamespace(args=args)


def evaluated(lm, folder, *names):
    found = simple_evaluate(
        model=lm,
        tasks=list(load_tasks(names, str(folder)).values()),
        apply_chat_template=True,
        fewshot_as_multiturn=False,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    answers = {n: [s["filtered_resps"] for s in found["samples"][n]] for n in names}
    return answers, found["results"]


def test_with_the_full_cache_every_figure_is_mlx_lms_own(folder, lm_of, theirs):
    names = ("facts", "choices")
    ours, figures = evaluated(lm_of(), folder, *names)
    wanted, their_figures = evaluated(theirs, folder, *names)
    assert ours == wanted and figures["choices"]["acc,none"] == 1.0
    for name, metric in zip(names, ("exact_match,none", "acc,none")):
        assert figures[name]["sample_len"] == N
        assert figures[name][metric] == their_figures[name][metric]


def rows(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_a_policy_answers_as_its_own_batches_do(folder, lm_of, demo_llama):
    model, tokenizer = demo_llama
    lm = lm_of(SNAPKV)
    answers, _ = evaluated(lm, folder, "whole_facts")
    chats = [[{"role": "user", "content": row["text"]}] for row in rows(folder)]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in chats]
    given = {"max_tokens": 12, "policy": SNAPKV}
    wanted = [batch_generate(model, tokenizer, [prompt], **given).texts for prompt in prompts]
    assert answers["whole_facts"] == wanted
    assert [report.prompt_tokens for report in lm.reports] == [len(p) for p in prompts]
    assert all(report.entries == len(p) // 4 for report, p in zip(lm.reports, prompts))


def test_choices_are_judged_over_the_compressed_context(folder, lm_of, demo_llama, theirs):
    """Against a context compressed by hand, whose choices are fed token by token."""
    model, tokenizer = demo_llama
    row = rows(folder)[0]
    context = theirs.apply_chat_template([{"role": "user", "content": row["text"]}])
    requests = [request(context, choice) for choice in row["choices"]]
    found = lm_of(SNAPKV).loglikelihood(requests)
    tokens = tokenizer.encode(context, add_special_tokens=False)
    for (logprob, greedy), choice in zip(found, row["choices"]):
        cache, report = prefill(model, tokens[:-1], SNAPKV)
        assert report.entries == (len(tokens) - 1) // 4
        rest = tokenizer.encode(context + choice, add_special_tokens=False)[len(tokens) :]
        fed = [tokens[-1], *rest[:-1]]
        logits = mx.concatenate([model(mx.array([[token]]), cache=cache)[0] for token in fed])
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        total = sum(logprobs[i, token].item() for i, token in enumerate(rest))
        assert logprob == pytest.approx(total, abs=1e-3)
        assert greedy == (mx.argmax(logits, axis=-1).tolist() == rest)
    full = [logprob for logprob, _ in theirs.loglikelihood(requests)]
    assert not np.allclose(full, [logprob for logprob, _ in found], atol=1e-2)


@pytest.mark.parametrize("policy", (None, STREAMING))
def test_stop_strings_and_lengths_are_honoured(lm_of, theirs, policy):
    context = theirs.apply_chat_template([{"role": "user", "content": "What is it?"}])
    (whole,) = theirs.generate_until([request(context, {"until": ["\0"], "max_gen_toks": 9})])
    stop, nothing = whole[2], []

    def answer(max_tokens=None, **options):
        (found,) = lm_of(policy, max_tokens=max_tokens).generate_until([request(context, options)])
        return found

    for until in ([stop], stop):
        assert answer(until=until, max_gen_toks=9) == whole.partition(stop)[0]
    assert answer(until=nothing, max_gen_toks=9) == answer(max_gen_toks=9) == whole
    assert nothing == []  # the task's own list
    short = answer(max_gen_toks=3)
    assert whole.startswith(short) and short != whole
    assert answer(max_tokens=3, max_gen_toks=9) == short
    assert mlx_evaluate.batch_generate.__module__ == "mlx_lm.generate"  # theirs again


def test_runs_go_on_and_no_methods_answer_depends_on_the_others(folder, lm_of, tmp_path):
    tasks = load_tasks(["*facts"], str(folder))
    assert list(tasks) == ["facts", "whole_facts"]
    options = {"limit": 3, "apply_chat_template": True}
    full, streaming, snapkv = Method(), Method(STREAMING), Method(SNAPKV)
    batches = []

    def asked(*methods):
        results = Results({"task": "lm"}, tmp_path / "r.jsonl")
        on_documents = lambda *batch: batches.append(batch)  # noqa: E731
        return run(lm_of, tasks, methods, results, on_documents, **options)

    asked(full, streaming)
    assert batches == [(True, 2), (True, 1)] * 4
    batches.clear()
    together = asked(full, streaming, snapkv)
    assert batches == [(False, 3), (False, 3), (True, 2), (True, 1)] * 2
    alone = run(lm_of, tasks, [snapkv], Results({}), **options)
    assert together[2::3] == alone
    assert [r["prompts"] for r in together] == [0, 3, 3] * 2
    assert [(r["n"], len(r["documents"])) for r in together] == [(3, 3)] * 6
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + 6


def test_a_failing_prompt_ends_the_run_and_mlx_lm_is_as_it_was(lm_of, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(harness, "batch_generate", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        lm_of().generate_until([request("Why?", {"until": []})])
    assert mlx_evaluate.batch_generate.__module__ == "mlx_lm.generate"


@pytest.mark.parametrize(
    "name, message",
    (
        ("nothing_such", "--tasks nothing_such: lm-evaluation-harness has no such task"),
        ("gone", "--tasks gone can't be loaded: FileNotFoundError"),
        ("rolling", "--tasks rolling is not supported: it scores whole texts"),
    ),
)
def test_tasks_that_cant_be_are_named(folder, name, message):
    with pytest.raises(SnapKVError, match=message):
        load_tasks(["facts", name], str(folder))


def test_rulers_prompts_are_made_for_the_length_and_by_the_seed(monkeypatch):
    pytest.importorskip("wonderwords", reason="needs pip install -e '.[dev]'")
    monkeypatch.setenv("LOCAL_RANK", "1")  # nltk's data are not downloaded
    path = f"{Path(lm_eval.tasks.__file__).parent}/ruler/niah_single_1.yaml"
    told = {"tokenizer": str(MODELS["demo"]), "max_seq_lengths": [700]}
    made = [load_tasks([path], metadata=told, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (tasks["niah_single_1"].eval_docs for tasks in made)
    assert first["input"] == again["input"] != other["input"]
    assert set(first["max_length"]) == {700} and max(first["length"]) <= 700


def test_the_hooks_of_mlx_lm_that_policies_stand_on(theirs, lm_of):
    """An upgrade of mlx-lm that changes one of these is to fail here, and not in a figure."""
    assert set(vars(theirs)) <= set(vars(lm_of()))  # what its __init__ would have set
    generate = inspect.getsource(mlx_evaluate.MLXLM.generate_until)
    assert "completions = batch_generate(" in generate and ").texts" in generate
    choose = inspect.getsource(mlx_evaluate.MLXLM.loglikelihood)
    assert "logprobs, cache = self._process_prompt(prefix)" in choose
    parameters = inspect.signature(mlx_evaluate.MLXLM._process_prompt).parameters
    assert list(parameters) == ["self", "prompt", "step_size"]
