"""Generate RULER (Hsieh et al., 2024) for any tokenizer, offline, with lm-evaluation-harness' own generators.

    pip install 'lm_eval[ruler]==0.4.13'
    make real-models
    python scripts/make_ruler.py real-models/smollm2-135m-instruct real-models/ruler/smollm2-135m-instruct \
        --length 2048 --length 4096

It writes OUT/<length>/<task>.jsonl with the columns of kvpress' datasets (`context`, `question`, `answer_prefix`,
the list `answer`, and `max_new_tokens`), plus `task` and `length`. The first three columns joined are RULER's prompt,
whose last line is the question. The same tokenizer, length and seed give the same rows on every machine. A smaller
`--samples` gives the first rows of a larger one. Nothing is downloaded: essays come from `--essays`,
sentences end after `.`, `!` or `?`, and qa_squad and qa_hotpot are left out. cwe begins with RULER's solved example,
which lm-evaluation-harness 0.4.13 counts but leaves out.
"""

import io
import json
import os
import random
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from results_page import options

from mlx_snapkv.errors import SnapKVError

ESSAYS = Path("real-models/essays")
MAX_SAMPLES = 500  # samples that a generator creates
MIN_LENGTH = 1024  # RULER's solved examples may not fit into shorter prompts
# RULER's tokens_to_generate, by the first part of a task's name; its prompts leave room for them.
MAX_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
NIAH = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery".split()
TASKS = (*(f"niah_{name}" for name in NIAH), "vt", "cwe", "fwe")


def make_rows(
    task: str, tokenizer: Path, length: int, samples: int, seed: int = 42, essays: Path = ESSAYS
) -> list[dict]:
    """Return the first `samples` rows of a task.

    Args:
        task: one of `TASKS`.
        tokenizer: folder that transformers' AutoTokenizer can read.
        length: maximum number of tokens in a prompt and its answer; lm_eval lets cwe and fwe exceed it by up to 75.
        samples: number of rows.
        seed: random seed.
        essays: folder of .txt files, which are the haystack of most niah tasks.

    Raises:
        SnapKVError: lm_eval is not installed, there are no essays, or `length` is too short.
    """
    if length < MIN_LENGTH:
        raise SnapKVError(f"--length must be at least {MIN_LENGTH} tokens, not {length}")
    try:
        with patch.dict(os.environ, LOCAL_RANK="1"):  # lm_eval downloads nltk's data if it is 0
            from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
    except ImportError as error:
        raise SnapKVError(f"pip install 'lm_eval[ruler]==0.4.13': {error}") from error
    generators = {"vt": vt_utils.get_vt_dataset, "cwe": cwe_utils.get_cw_dataset}
    generators["fwe"] = fwe_utils.fwe_download
    generate = generators.get(task) or getattr(niah_utils, task)
    random.seed(seed)
    np.random.seed(seed)
    cwe_utils.RNG.seed(seed)
    haystack = partial(_haystack, essays, prepare_niah.get_haystack)
    with (
        patch.object(niah_utils, "get_haystack", haystack),
        patch.object(prepare_niah, "cached_sent_tokenize", split_sentences),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        rows = generate(tokenizer=str(tokenizer), max_seq_lengths=[length])["test"]
    return [_columns(task, rows[i]) for i in range(min(samples, len(rows)))]


def _haystack(essays: Path, get_haystack: Callable, type_haystack: str) -> list[str] | str:
    """Return the words of all essays in file-name order. For other haystack types, return lm_eval's own."""
    if type_haystack != "essay":
        return get_haystack(type_haystack=type_haystack)
    texts = [path.read_text(encoding="utf-8") for path in sorted(essays.glob("*.txt"))]
    if not texts:
        raise SnapKVError(
            f"{essays} has no .txt files: run `make real-models`, or give --essays a folder"
        )
    return " ".join(texts).split()


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, which end after `.`, `!` or `?` before white space."""
    return re.split(r"(?<=[.!?])\s+", text)


def _columns(task: str, sample: dict) -> dict:
    """Convert an lm_eval sample to kvpress' columns. As in RULER, a space separates question and `answer_prefix`."""
    example = f"{sample['input_example']}\n" if "input_example" in sample else ""
    document, _, question = sample["input"].rpartition("\n")
    return {
        "context": f"{example}{document}\n",
        "question": f"{question} ",
        "answer_prefix": sample["gen_prefix"],
        "answer": sample["outputs"],
        "max_new_tokens": MAX_TOKENS[task.partition("_")[0]],
        "task": task,
        "length": sample["max_length"],
    }


def main() -> None:
    """Write OUT/LENGTH/TASK.jsonl for each task and length."""
    parser = options(__doc__)
    parser.add_argument("tokenizer", type=Path, help="a model's folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", action="append", choices=TASKS, help="all without it")
    parser.add_argument("--length", type=int, action="append", required=True, help="in tokens")
    parser.add_argument("--samples", type=int, default=100, help=f"at most {MAX_SAMPLES}")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--essays", type=Path, default=ESSAYS)
    args = parser.parse_args()
    if not 1 <= args.samples <= MAX_SAMPLES:
        parser.error(f"--samples must be 1 to {MAX_SAMPLES}, not {args.samples}")
    for task in args.task or TASKS:
        for length in args.length:
            try:
                rows = make_rows(task, args.tokenizer, length, args.samples, args.seed, args.essays)
            except SnapKVError as error:
                parser.error(str(error))
            path = args.out / str(length) / f"{task}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            print(f"{path}: {len(rows)} samples", file=sys.stderr)


if __name__ == "__main__":
    main()
