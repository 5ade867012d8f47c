"""Facts in words, hidden in essays of four times a model's trained length, asked for one by one.

    make real-models
    python scripts/measure_far.py                # prints what is answered; an hour for the full cache

The document is read once within `RESIDENT` entries, and every question goes on from a copy of what was read.
"""

import argparse
import copy
from pathlib import Path

import numpy_attention

numpy_attention.install()

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from mlx_snapkv import prefill, stream_generate  # noqa: E402
from mlx_snapkv.engine.prefill import read  # noqa: E402
from mlx_snapkv.models.rope import trained_length  # noqa: E402

RESIDENT = "keydiff:budget=1024,n_window=50%"
# A sentence, a question, the beginning of its answer, and a word that is to follow.
LINES = Path(__file__).with_name("far_facts.txt").read_text().splitlines()
FACTS = [line.split(" | ") for line in LINES]


def hidden(tokenizer, n_tokens: int) -> tuple[list[int], str]:
    """A prompt with the facts all over it, and the end of the template."""
    texts = sorted(Path("real-models/essays").glob("*.txt"))
    ids = tokenizer.encode(" ".join(text.read_text() for text in texts))[: n_tokens - 400]
    parts, size = [], len(ids) // len(FACTS)
    for i, (sentence, *_) in enumerate(FACTS):
        part = tokenizer.decode(ids[i * size : (i + 1) * size])
        cut = part.rfind(". ", 0, len(part) // 2) + 2
        parts += [part[:cut], sentence, " ", part[cut:]]
    messages = [{"role": "user", "content": "".join(parts) + "@@@"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head, tail = text.split("@@@")
    return tokenizer.encode(head, add_special_tokens=False), tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="real-models/smollm2-135m-instruct")
    parser.add_argument("--budget", default="1024", help="entries that a token reads, or a share")
    parser.add_argument("--full", action="store_true", help="by the full cache")
    args = parser.parse_args()
    model, tokenizer = mlx_lm.load(args.model)
    prompt, tail = hidden(tokenizer, 4 * trained_length(model))
    policy = f"{RESIDENT} then snapkv:budget={args.budget},lookahead=0"
    answer, options = stream_generate, {"policy": policy, "memory": "recall"}
    if args.full:
        answer, options, cache = mlx_lm.stream_generate, {}, make_prompt_cache(model)
        read(model, mx.array(prompt), cache, {"prefill_step_size": 512})
    else:
        cache, _ = prefill(model, prompt, RESIDENT, memory="recall")
    right = 0
    for _, question, begun, value in FACTS:
        asked = f"\n\n{question} Answer from the text above.{tail}{begun}"
        tokens = tokenizer.encode(asked, add_special_tokens=False)
        options |= {"max_tokens": 16, "prompt_cache": copy.deepcopy(cache)}
        text = "".join(r.text for r in answer(model, tokenizer, tokens, **options))
        right += value.lower() in text.lower()
        print(f"{begun} ... {text!r}", flush=True)
    print(f"{len(prompt)} tokens: {right} of {len(FACTS)}")


if __name__ == "__main__":
    main()
