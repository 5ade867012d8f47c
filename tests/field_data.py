"""Small copies of the field's data sets, in their formats and with texts of our own, for models that look facts up."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mlx_snapkv.demo.questions import make_haystack

N_TOKENS = 400


def facts(tokenizer, seed: int, n_tokens: int = N_TOKENS, n_facts: int = 4):
    """A document and the facts in it, which the embedded models are asked for."""
    return make_haystack(tokenizer, random.Random(seed), n_facts, n_tokens)


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def prepared(tokenizer, seed: int, wrong: bool = False) -> dict:
    """A row as RULER's scripts write it with the template type `base`."""
    document, (fact, other, *_) = facts(tokenizer, seed)
    return {
        "index": 17,
        "input": f"{document}\n\n{fact.question}",
        "outputs": [fact.value, other.value] if wrong else [fact.value],
        "length": N_TOKENS,
        "length_w_model_temp": N_TOKENS,
        "answer_prefix": "",
        "token_position_answer": 3,
    }


def ruler(folder: Path, tokenizer) -> Path:
    """Two tasks: one answer that is right, and one that has half of what it should have."""
    write_lines(folder / "4096" / "niah_single_1" / "validation.jsonl", [prepared(tokenizer, 1)])
    write_lines(folder / "4096" / "vt" / "validation.jsonl", [prepared(tokenizer, 2, wrong=True)])
    return folder


def ruler_parquet(folder: Path, tokenizer) -> Path:
    """As kvpress has it, a file for each length."""
    made = []
    for seed, task in enumerate(["qa_1", "niah_multikey_1", "qa_1"]):
        document, (fact, *_) = facts(tokenizer, seed)
        made.append(
            {
                "context": document + "\n\n",
                "question": fact.question,
                "answer_prefix": "",
                "answer": ["nothing of this", fact.value] if task == "qa_1" else [fact.value],
                "task": task,
                "max_new_tokens": 24,
            }
        )
    write_parquet(folder / "4096" / "test-00000-of-00001.parquet", made)
    return folder


def longbench(folder: Path, tokenizer) -> Path:
    """Tasks with and without the chat template; three rows of the first, of a length each."""
    chat = "{context}\n\n{input}"
    raw = "<|bos|><|user|>{context}\n\n{input}<|assistant|>"
    wording = {"hotpotqa": chat, "triviaqa": raw, "passage_count": chat, "dureader": chat}
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(wording))
    lengths = {"hotpotqa": 24, "triviaqa": 32, "passage_count": 32, "dureader": 128}
    (folder / "config" / "dataset2maxlen.json").write_text(json.dumps(lengths))
    for task in ("hotpotqa", "triviaqa", "passage_count", "hotpotqa_e"):
        n_rows = 3 if task == "hotpotqa" else 1
        write_lines(
            folder / "data" / f"{task}.jsonl",
            [_longbench_row(tokenizer, task, i) for i in range(n_rows)],
        )
    return folder


def _longbench_row(tokenizer, task: str, i: int) -> dict:
    document, (fact, *_) = facts(tokenizer, i, n_tokens=1000 if i == 2 else N_TOKENS)
    return {
        "input": fact.question,
        "context": document,
        "answers": ["a wrong one", "99" if task == "passage_count" else fact.value],
        "length": [3999, 4000, 8000][i],
        "dataset": task,
        "language": "en",
        "all_classes": None,
        "_id": f"{task}{i}",
    }


def longbench2(folder: Path, tokenizer) -> Path:
    document, (fact, *_) = facts(tokenizer, 5)
    row = {
        "_id": "1",
        "domain": "d",
        "sub_domain": "s",
        "difficulty": "easy",
        "length": "short",
        "question": fact.question,
        **{f"choice_{x}": f"choice {x}" for x in "ABCD"},
        "answer": "B",
        "context": document,
    }
    (folder / "prompts").mkdir(parents=True)
    (folder / "prompts" / "0shot.txt").write_text("$DOC$\n\n$Q$ ($C_A$, $C_B$, $C_C$, $C_D$)")
    rows = [row, {**row, "difficulty": "hard", "length": "long"}]
    (folder / "data.json").write_text(json.dumps(rows))
    return folder


EVAL_UTILS = '''"""Not SCBench's own."""
import torch

DATA_NAME_TO_MAX_NEW_TOKENS = {NAMES: 24, "scbench_two": {"a": 1}}
multiturn_templates = {NAMES: "{context}\\n\\n{input}"}
multiturn_templates_scdq = {NAMES: "{context}", "scbench_qa_eng": ("{context}", "\\n\\n{question}")}
multiturn_follow_up_templates = {NAMES: "{pre_ans}\\n\\n{input}"}
multiturn_follow_up_templates_in_chat_tempate = {NAMES: "{input}"}


def loads_a_model():
    torch.exit()
'''


def scbench(folder: Path, tokenizer) -> Path:
    """One task of text lines and one of parquet, three questions about a context each."""
    folder.mkdir(parents=True)
    tasks = ["scbench_kv", "scbench_qa_eng"]
    text = EVAL_UTILS
    for values in (
        "24",
        '"{context}\\n\\n{input}"',
        '"{context}"',
        '"{pre_ans}\\n\\n{input}"',
        '"{input}"',
    ):
        entries = ", ".join(f'"{task}": {values}' for task in tasks)
        text = text.replace(f"NAMES: {values}", entries, 1)
    (folder / "eval_utils.py").write_text(text)
    for task in tasks:
        document, found = facts(tokenizer, 7)
        before = "\n\n" if task == "scbench_kv" else ""
        turns = [{"input": before + f.question, "answer": f.value} for f in found[:3]]
        row = {"id": 0, "context": document, "multi_turns": turns}
        if task == "scbench_kv":
            write_lines(folder / "data" / "scbench_kv.jsonl", [row])
        else:
            write_parquet(folder / task / "test-00000-of-00001.parquet", [row])
    return folder
