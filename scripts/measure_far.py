"""Facts in words, hidden in essays of four times a model's trained length, read sparsely; prints answers.

make real-models; python scripts/measure_far.py [ENTRIES A TOKEN READS] [ENTRIES A CHUNK CHOOSES]
"""

import copy
import sys
from pathlib import Path

import numpy_attention

numpy_attention.install()

from mlx_snapkv import prefill, stream_generate  # noqa: E402
from mlx_snapkv.cli.loading import load_model  # noqa: E402

TOKENS = 4 * 8192 - 400
BUDGET, TOP_K = [*sys.argv[1:], *("6.25%", "1024")[len(sys.argv) - 1 :]]
SPARSE = f"budget={BUDGET},read_top_k={TOP_K}"
# A sentence, a question, the beginning of its answer, and a word that is to follow.
LINES = Path(__file__).with_name("far_facts.txt").read_text().splitlines()
FACTS = [line.split(" | ") for line in LINES]

model, tokenizer = load_model("real-models/smollm2-135m-instruct")
texts = sorted(Path("real-models/essays").glob("*.txt"))
ids = tokenizer.encode(" ".join(text.read_text() for text in texts))[:TOKENS]
document, size = "", len(ids) // len(FACTS)
for i, (sentence, *_) in enumerate(FACTS):
    part = tokenizer.decode(ids[i * size : (i + 1) * size])
    cut = part.rfind(". ", 0, len(part) // 2) + 2
    document += f"{part[:cut]}{sentence} {part[cut:]}"
message = {"role": "user", "content": f"{document}@@@"}
text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
head, tail = text.split("@@@")
cache, _ = prefill(model, tokenizer.encode(head, add_special_tokens=False), sparse=SPARSE)
right = 0
for _, question, begun, value in FACTS:
    asked = f"\n\n{question} Answer from the text above.{tail}{begun}"
    tokens = tokenizer.encode(asked, add_special_tokens=False)
    options = {"sparse": SPARSE, "prompt_cache": copy.deepcopy(cache)}
    answer = stream_generate(model, tokenizer, tokens, 16, **options)
    found = "".join(response.text for response in answer)
    right += value in found
    print(f"{begun} ...{found!r}", flush=True)
print(f"{right} of {len(FACTS)}")
