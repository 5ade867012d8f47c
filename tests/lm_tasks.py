"""Tasks of lm-evaluation-harness over local data, which the embedded models can do."""

import json
import random
from pathlib import Path

from mlx_snapkv.demo.questions import make_haystack

N = 5  # documents of each
CHOOSE = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0}


def generate(*until):
    options = {"max_gen_toks": 12, "until": until, "do_sample": False}
    task = {"output_type": "generate_until", "doc_to_target": "{{value}}"}
    return task | {"generation_kwargs": options}


# By name, the task and its metric.
TASKS = {
    "facts": (generate("."), "exact_match"),
    "whole_facts": (generate(), "exact_match"),
    "choices": (CHOOSE, "acc"),
    "rolling": ({"output_type": "loglikelihood_rolling", "doc_to_target": ""}, "word_perplexity"),
    "gone": (CHOOSE, "acc"),
}


def write_tasks(folder: Path, tokenizer) -> Path:
    """Files of tasks over local data: facts in documents of 500 tokens, generated and chosen; the folder."""
    rows = []
    for seed in range(N):
        text, facts = make_haystack(tokenizer, random.Random(seed), 4, 500)
        question, choices = facts[0].question, [f" {fact.value}" for fact in facts]
        rows.append({"text": f"{text}\n\n{question}", "value": choices[0], "choices": choices})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, (task, metric) in TASKS.items():
        path = folder / "gone.jsonl" if name == "gone" else data
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
        task = {"task": name, "test_split": "test", "doc_to_text": "{{text}}", **where, **task}
        task["metric_list"] = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")
    return folder
