"""Facts in words, hidden in essays of four times a model's trained length, read sparsely; prints answers.

    make real-models; python scripts/measure_far.py [ENTRIES A TOKEN READS] [ENTRIES A CHUNK CHOOSES]

There are three documents with eight facts each, of which two cores read and ask one in ten minutes.
"""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy_attention

from mlx_snapkv import prefill, stream_generate
from mlx_snapkv.cli.loading import load_model

TOKENS = 4 * 8192 - 400  # of the essays
EACH = 8  # facts of a document
APART = 9000  # tokens from where one document's essays begin to where the next one's do
REAL = Path("real-models")
LINES = Path(__file__).with_name("far_facts.txt").read_text(encoding="utf-8").splitlines()


class Fact(NamedTuple):
    sentence: str
    question: str
    begun: str  # the beginning of its answer
    value: str  # that is to follow


def documents(tokenizer) -> Iterator[tuple[str, list[Fact]]]:
    """Texts, and the facts that they contain, evenly spaced."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((REAL / "essays").glob("*.txt")))
    ids, size = tokenizer.encode(" ".join(texts)), TOKENS // EACH
    facts = [Fact(*line.split(" | ")) for line in LINES]
    for number, start in enumerate(range(0, len(facts), EACH)):
        own, text = facts[start : start + EACH], ""
        for i, fact in enumerate(own):
            begin = number * APART + i * size
            part = tokenizer.decode(ids[begin : begin + size])
            cut = part.rfind(". ", 0, len(part) // 2) + 2
            text += f"{part[:cut]}{fact.sentence} {part[cut:]}"
        yield text, own


def main() -> None:
    numpy_attention.install()
    budget, top_k = [*sys.argv[1:], *("6.25%", "1024")[len(sys.argv) - 1 :]]
    sparse = f"budget={budget},read_top_k={top_k}"
    model, tokenizer = load_model(str(REAL / "smollm2-135m-instruct"))
    for document, facts in documents(tokenizer):
        message = {"role": "user", "content": f"{document}@@@"}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        head, tail = text.split("@@@")
        cache, _ = prefill(model, tokenizer.encode(head, add_special_tokens=False), sparse=sparse)
        right = 0
        for fact in facts:
            asked = f"\n\n{fact.question} Answer from the text above.{tail}{fact.begun}"
            tokens = tokenizer.encode(asked, add_special_tokens=False)
            options = {"sparse": sparse, "prompt_cache": copy.deepcopy(cache)}
            answer = stream_generate(model, tokenizer, tokens, 16, **options)
            found = "".join(response.text for response in answer)
            right += fact.value in found
            print(f"{fact.begun} ...{found!r}", flush=True)
        print(f"{right} of {len(facts)}", flush=True)


if __name__ == "__main__":
    main()
