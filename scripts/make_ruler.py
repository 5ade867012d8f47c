"""RULER (Hsieh et al., 2024) for any tokenizer, offline: made by lm-evaluation-harness' own generators.

    pip install 'lm_eval[ruler]==0.4.13'
    make real-models
    python scripts/make_ruler.py real-models/smollm2-135m-instruct real-models/ruler/smollm2-135m-instruct \
        --length 2048 --length 4096

Writes OUT/<length>/<task>.jsonl with the columns that kvpress' data sets share: `context`, `question`,
`answer_prefix`, `answer` (a list), `max_new_tokens`; and `task` and `length`. The three texts, one after the other, are
RULER's prompt: the question is its last line. The same tokenizer, length and seed make the same rows on every machine,
and fewer samples are the first of more. Nothing is downloaded: essays are those of `--essays`, sentences end after `.`,
`!` or `?`, and qa_squad and qa_hotpot are left out. cwe has RULER's solved example in front, which
lm-evaluation-harness 0.4.13 counts but leaves out.
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
MOST_SAMPLES = 500  # that a generator makes
LEAST_LENGTH = 1024  # in shorter prompts RULER's solved examples may never fit
# By the first part of a task's name: RULER's tokens_to_generate, for which its prompts leave room.
MAX_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
NIAH = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery".split()
TASKS = (*(f"niah_{name}" for name in NIAH), "vt", "cwe", "fwe")


def make_rows(
    task: str, tokenizer: Path, length: int, samples: int, seed: int = 42, essays: Path = ESSAYS
) -> list[dict]:
    """The first `samples` rows of a task.

    Args:
        tokenizer: a folder that transformers' AutoTokenizer reads.
        length: tokens of a prompt and its answer, at most; cwe and fwe may have up to 75 more, as lm_eval counts.
        essays: a folder of .txt files, the haystack of most niah tasks.

    Raises:
        SnapKVError: lm_eval is not installed, there are no essays, or `length` is too short.
    """
    if length < LEAST_LENGTH:
        raise SnapKVError(f"--length must be at least {LEAST_LENGTH} tokens, not {length}")
    try:
        with patch.dict(os.environ, LOCAL_RANK="1"):  # any but 0: nltk's data are not downloaded
            from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
    except ImportError as error:
        raise SnapKVError(f"pip install 'lm_eval[ruler]==0.4.13': {error}") from error
    made = {"vt": vt_utils.get_vt_dataset, "cwe": cwe_utils.get_cw_dataset}
    made["fwe"] = fwe_utils.fwe_download
    generate = made.get(task) or getattr(niah_utils, task)
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
        found = generate(tokenizer=str(tokenizer), max_seq_lengths=[length])["test"]
    return [_columns(task, found[i]) for i in range(min(samples, len(found)))]


def _haystack(essays: Path, of_others: Callable, type_haystack: str) -> list[str] | str:
    """The words of all essays, by file name; of another type, lm_eval's own."""
    if type_haystack != "essay":
        return of_others(type_haystack=type_haystack)
    texts = [path.read_text(encoding="utf-8") for path in sorted(essays.glob("*.txt"))]
    if not texts:
        raise SnapKVError(
            f"{essays} has no .txt files: run `make real-models`, or give --essays a folder"
        )
    return " ".join(texts).split()


def split_sentences(text: str) -> list[str]:
    """The sentences of a text: each ends after `.`, `!` or `?` where white space follows."""
    return re.split(r"(?<=[.!?])\s+", text)


def _columns(task: str, sample: dict) -> dict:
    """A sample of lm_eval's in kvpress' columns; RULER has a space between question and the answer's beginning."""
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
    parser = options(__doc__)
    parser.add_argument("tokenizer", type=Path, help="a model's folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", action="append", choices=TASKS, help="all without it")
    parser.add_argument("--length", type=int, action="append", required=True, help="in tokens")
    parser.add_argument("--samples", type=int, default=100, help=f"at most {MOST_SAMPLES}")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--essays", type=Path, default=ESSAYS)
    args = parser.parse_args()
    if not 1 <= args.samples <= MOST_SAMPLES:
        parser.error(f"--samples must be 1 to {MOST_SAMPLES}, not {args.samples}")
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
