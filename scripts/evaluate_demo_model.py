"""Full-cache greedy accuracy of an embedded model over unseen questions, and its model card.

    python scripts/evaluate_demo_model.py mlx_snapkv/demo/models/llama --lengths 2048 4096 8192

Every question is asked on its own at the end of the document: the cache of the part that the questions
share is computed once and copied for each. The seeds of the documents are not used in training.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate, generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv.chat.common_prefix import common_prefix
from mlx_snapkv.demo.documents import Fact
from mlx_snapkv.demo.questions import is_right, make_haystack, question_prompt

FIRST_SEED = 1_000_000


def accuracy(model, tokenizer, length: int, documents: int, questions: int) -> tuple[int, int]:
    """Right answers and questions asked, over `documents` documents of about `length` tokens."""
    right = asked = 0
    for i in range(documents):
        rng = random.Random(FIRST_SEED + length + i)
        document, facts = make_haystack(tokenizer, rng, questions, length - 40)
        right += sum(ask_all(model, tokenizer, document, facts))
        asked += len(facts)
        print(f"{length} tokens: {right}/{asked}", flush=True)
    return right, asked


def ask_all(model, tokenizer, document: str, facts: list[Fact]) -> list[bool]:
    prompts = [question_prompt(tokenizer, document, fact.question) for fact in facts]
    shared = common_prefix(prompts)
    cache = make_prompt_cache(model)
    for _ in generate_step(mx.array(prompts[0][:shared]), model, max_tokens=0, prompt_cache=cache):
        pass
    results = []
    for prompt, fact in zip(prompts, facts):
        answer = generate(
            model, tokenizer, prompt[shared:], max_tokens=16, prompt_cache=copy.deepcopy(cache)
        )
        results.append(is_right(fact, answer))
    return results


CARD = """# {title}

A {kind} that looks facts up in long documents, small enough to ship
inside mlx-snapkv. Trained from scratch on synthetic English sentences made by
`mlx_snapkv/demo/documents.py`; it knows nothing else. It answers a question at the end of a document
about a fact hidden in it (an access code, a phone number, an invoice number, a pass phrase and so on).

- Parameters: {parameters:,}, float16.
- Shape: {shape}.
- Tokenizer: byte-level BPE of {vocab:,} tokens, one token per digit; any text can be encoded.
- Chat template: `<|user|>…<|assistant|>…<|end|>`; document and question go into one user message.
- Training: `python scripts/train_demo_model.py {arch} --out build/{arch}`, seed {seed}, {steps:,} steps and
  {tokens:,} tokens, Muon with a peak learning rate of {rate} (AdamW for embeddings and vectors), documents
  lengthened from 96 to {longest:,} tokens. The starting point is not random: previous-token and induction heads
  are planted (`scripts/demo_training/priming.py`). Sittings that the run was made in: {sittings}.

## Full-cache greedy accuracy

Exact answers to questions that training has not seen, one question at the end of each prompt, in float32:
`python scripts/evaluate_demo_model.py {folder} --lengths {lengths} --documents {documents} --card`

| tokens | right | of | accuracy |
|---|---|---|---|
{rows}
"""


def write_card(folder: Path, results: dict[int, tuple[int, int]], model, documents: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    run = json.loads((folder / "training.json").read_text())
    arch = config["model_type"].replace("_", "-")
    hybrid = "Qwen3-Next (linear and full attention in turn)"
    rows = [
        f"| {n:,} | {right} | {asked} | {right / asked:.3f} |"
        for n, (right, asked) in results.items()
    ]
    card = CARD.format(
        title=folder.name,
        kind="LLaMA" if arch == "llama" else hybrid,
        parameters=sum(v.size for _, v in tree_flatten(model.parameters())),
        shape=(
            f"{config['num_hidden_layers']} layers, hidden size {config['hidden_size']}, "
            f"{config['num_attention_heads']} heads over {config['num_key_value_heads']} KV heads of "
            f"{config['head_dim']}, RoPE base {config['rope_theta']:g}"
        ),
        vocab=config["vocab_size"],
        arch=arch,
        rate=run.pop("peak learning rate"),
        **run,
        folder=folder,
        lengths=" ".join(map(str, results)),
        documents=documents,
        rows="\n".join(rows),
    )
    (folder / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--documents", type=int, default=25)
    parser.add_argument("--questions", type=int, default=8, help="facts hidden in each document")
    parser.add_argument("--card", action="store_true", help="write the folder's README.md")
    args = parser.parse_args()
    model, tokenizer = load(str(args.folder))
    model.set_dtype(mx.float32)
    results = {
        n: accuracy(model, tokenizer, n, args.documents, args.questions) for n in args.lengths
    }
    if args.card:
        write_card(args.folder, results, model, args.documents)


if __name__ == "__main__":
    main()
