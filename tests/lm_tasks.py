"""Tasks of lm-evaluation-harness over local data, which the embedded models can do."""

import json
import random
from pathlib import Path

from mlx_snapkv.demo.questions import make_haystack

FACTS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
GENERATE = """
output_type: generate_until
doc_to_target: "{{value}}"
generation_kwargs: {max_gen_toks: 12, until: UNTIL, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
"""
CHOOSE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLL = "output_type: loglikelihood_rolling\ndoc_to_target: ''\nmetric_list: [{metric: word_perplexity}]"


N = 5  # documents of each


def write_tasks(folder: Path, tokenizer) -> Path:
    """yaml files of tasks over local data: facts in documents of 500 tokens, generated and chosen; the folder."""
    rows = []
    for seed in range(N):
        text, facts = make_haystack(tokenizer, random.Random(seed), 4, 500)
        question, choices = facts[0].question, [f" {fact.value}" for fact in facts]
        rows.append({"text": f"{text}\n\n{question}", "value": choices[0], "choices": choices})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kinds = {
        "facts": GENERATE.replace("UNTIL", "['.']"),
        "whole_facts": GENERATE.replace("UNTIL", "[]"),
        "choices": CHOOSE,
        "rolling": ROLL,
        "gone": CHOOSE,
    }
    for name, rest in kinds.items():
        path = folder / "gone.jsonl" if name == "gone" else data
        text = FACTS.format(name=name, data=path) + rest
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder
