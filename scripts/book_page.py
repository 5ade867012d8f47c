"""docs/book.md, written from docs/book.json and docs/benchmarks-book.json.

python scripts/book_page.py                            # writes docs/book.md again
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from results_page import ROOT, table, written_by

from mlx_snapkv.engine.report import format_bytes
from mlx_snapkv.reporting.table import as_markdown, setting_text
from mlx_snapkv.reporting.tables import tables

PAGE, RESULT, COST = (
    ROOT / "docs" / name for name in ("book.md", "book.json", "benchmarks-book.json")
)

INTRO = """\
# A book

A prompt that is too long for the memory is read within a fixed budget of KV entries, every entry goes to a file, and
each question chooses among all of them:

```python
from mlx_snapkv import Conversation

policy = "keydiff:budget=4096 then snapkv:top_k=1024"
book = Conversation(model, tokenizer, policy=policy, memory="recall:file")
book.attach(text)
for response in book.send("Where does the letter come from?"):
    print(response.text, end="")
```

1. The first policy evicts block by block while the text is read. An entry is stored before it can be evicted.
2. The question is read over the entries that are resident. Its queries then vote over **all** entries, which are read
   from the file a block at a time.
3. The second policy's best are gathered into a small cache, the question is read again over those, and the answer is
   decoded from them. The resident entries go on with question and answer to the next turn.

When to use it: for a text that is read once and asked several times, and whose full cache does not fit. The memory is
what two budgets say, however long the text is; the time to read grows with its length, not with the square of it; the
price is disk space, and a pass over the stored keys for every question. Where the full cache fits, `memory="recall"`
after full reading asks the same for less; where nobody will ask about what was evicted, a block policy alone is enough.
`recall:file:8bit` and `recall:file:4bit` take less of the disk, `recall`, `recall:8bit` and `recall:4bit` keep the
entries in memory.

Before it reads, a command says on stderr what that will take: tokens, resident entries and their bytes, bytes on disk
and what is free in that folder. It warns if the disk has not enough room, and if so few entries are gathered that a
value hardly fits with what stands around it. The closing line says what it took.
"""

SHARES = """\
## What it finds

Documents with {facts} facts of several tokens, each asked for in a turn of its own, after one reading: {asked}
questions a figure. "1/32" is the share of the document's entries that is resident per KV head; blocks of {block}
tokens.

- *Full reading, recall*: full attention while the document is read, all entries kept, the same votes and as many
  gathered.
- *KeyDiff alone* answers from what is resident; what was evicted is gone (`memory="drop"`).
- *Two stages*: the policies of *this*, but `memory="drop"`: the votes choose among what is resident.
- *This*: the same, `memory="recall:file"`.

As many are gathered as are resident, {least} at least. Nowhere are answer tokens decoded on all entries first
(`lookahead=0`), which a book can't do.

At 16,000 tokens `demo` is beyond the 9,000 that it was trained to, and its full cache finds half; the fewer entries it
is shown, the more it finds, as long as the right ones are among them.
"""

CHANGED = """\
## What decides

One thing changed at a time, {tokens:,} tokens, 1/{share} of the entries resident, {asked} questions a figure.
"""

KERNELS = """\
**Pooling** (`pool_kernel`). Votes fall on single tokens, and what is wanted is the run around them: the kernel should
be as wide as the values and their names.
"""

SIZES = """\
**Gathered entries** per KV head. The sink (4) and the recent window (32, or half where that is less) are part of
them: of 64 entries, 28 are the votes'. A book wants somewhat more than full reading does, since its question is read
over what is resident and what is gathered, never over all. And it has no tokens to spare that are decoded on all
entries first (`lookahead=4`, SnapKV's default after full reading), which are most of a value here.
"""

MEMORIES = """\
**Where the entries are, and in how many bits.** The queries of a question see quantised keys when they vote, and the
answer what is gathered of them.
"""

TASKS = """\
## Chains and several facts

`demo-tasks`, {tokens:,} tokens, 1/{share} of the entries resident, {least} gathered, exact whole answers. Two or three
facts in one question (*several*), names written out over two and three links. *Unsure* is `verify="unsure"`: a token
that is not sure votes over all entries again ([answers.md](answers.md)). What an answer finds out on its way, no
question has voted for: with one fact in hand, look for the next with `verify="unsure"`, and gather more than for one.
"""

COSTS = """\
## What it costs

{setting} The ratios are what carries over, and only to machines of its kind. The same tables alone:
[benchmarks-book.md](benchmarks-book.md). `--long-prompts 1048576` measures a million tokens.
"""

PICTURES = """\
![peak memory by length](benchmarks-book-peak.png)

![seconds by length](benchmarks-book-seconds.png)
"""

ARITHMETIC = """\
## A million tokens on a Mac with 16 GB

**Arithmetic, not measured.** Nothing on this page was measured on a Mac, or on a model of this size. A model with
{layers} layers and {heads} KV heads of {size}, {tokens:,} tokens; quantised entries in groups of 64 with a scale and a
bias of 16 bits each; a disk that reads 3 or 6 GB/s.
"""

MEMORY = """\
In memory, whatever the length: {resident} of resident entries (`keydiff:budget=4096`, room for a block of 512
included) and {gathered} of gathered ones (`snapkv:top_k=1024`, 1,664 with sink and window), both in bfloat16, beside
{weights} of weights in 4 bits and what a chunk's computation takes. Votes are shares of a sum that takes a pass of its
own, so the keys of a book this long are read twice for a question: twice the seconds in the table.
"""


def page(result: dict[str, Any], cost: dict[str, Any] | None) -> str:
    """The page; `cost` is the result of `mlx-snapkv bench --book`."""
    rows = result["rows"]
    changed = [r for r in rows if r["about"] in ("kernels", "gathered", "memories")]
    first = changed[0]
    lines = [INTRO, written_by(result), ""]
    lines += [SHARES.format(**result)]
    for model, tokens in dict.fromkeys((r["model"], r["tokens"]) for r in _of(rows, "shares")):
        mine = [r for r in _of(rows, "shares") if (r["model"], r["tokens"]) == (model, tokens)]
        lines += [f"### `{model}`, {tokens:,} tokens", "", *_shares(mine), ""]
    lines += [CHANGED.format(**result | first)]
    for about, text, head in (
        ("kernels", KERNELS, "kernel"),
        ("gathered", SIZES, "gathered"),
        ("memories", MEMORIES, "memory"),
    ):
        lines += [text, *_changed(_of(rows, about), head), ""]
    stored = [
        f"{r['value']} {format_bytes(r['stored_bytes'])}"
        for r in _of(rows, "memories")
        if r["model"] == first["model"] and "file" in r["value"]
    ]
    lines += [f"On disk (`{first['model']}`, of float32): {', '.join(stored)}.", ""]
    tasks = _of(rows, "tasks")
    lines += [TASKS.format(**result | first), *_tasks(tasks), ""]
    if cost is not None:
        setting = setting_text(cost).replace("\n\n", " ")
        lines += [COSTS.format(setting=setting)]
        for made in tables(cost):
            lines += [f"### {made.title}", "", made.remark, "", as_markdown(made), ""]
        lines += [PICTURES]
    lines += [_arithmetic()]
    return "\n".join(lines)


def _of(rows: Iterable[dict[str, Any]], about: str) -> list[dict[str, Any]]:
    return [r for r in rows if r["about"] == about]


def _shares(rows: list[dict[str, Any]]) -> list[str]:
    full, *others = rows
    shares = list(dict.fromkeys(r["share"] for r in others))
    found = {(r["way"], r["share"]): r for r in others}
    body = [
        [way, *(_right(found[way, share]) for share in shares)]
        for way in dict.fromkeys(r["way"] for r in others)
    ]
    header = ["", *(f"1/{share}" for share in shares)]
    return [f"Full cache: {_right(full)}.", "", *table(header, body)]


def _changed(rows: list[dict[str, Any]], head: str) -> list[str]:
    """A column for each value, a row for each model and way."""
    values = list(dict.fromkeys(r["value"] for r in rows))
    found = {(r["model"], r["way"], r["value"]): r for r in rows}
    body = [
        [f"`{model}`, {way}", *(_right(found[model, way, value]) for value in values)]
        for model, way in dict.fromkeys((r["model"], r["way"]) for r in rows)
    ]
    return [*table([head, *values], body), *_all_right(rows)]


def _tasks(rows: list[dict[str, Any]]) -> list[str]:
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    found = {(r["way"], r["task"]): r for r in rows}
    body = [
        [way, *(_right(found[way, task]) for task in tasks)]
        for way in dict.fromkeys(r["way"] for r in rows)
    ]
    return [*table(["", *tasks], body), *_all_right(rows)]


def _right(row: dict[str, Any]) -> str:
    return f"{row['right']}/{row['asked']}"


def _all_right(rows: list[dict[str, Any]]) -> list[str]:
    if any(r["right"] < r["asked"] for r in rows):
        return []
    return ["", "Everything scores 1.00 here: these questions tell nothing apart."]


def _arithmetic() -> str:
    layers, heads, size, tokens = 32, 8, 128, 1_000_000
    numbers = layers * heads * size * 2  # of a token, keys and values
    body = []
    for name, bits in (("bfloat16", 16.0), ("8 bits", 8.5), ("4 bits", 4.5)):
        whole = tokens * numbers * bits / 8
        seconds = [f"{whole / 2 / speed:.1f} s" for speed in (3e9, 6e9)]
        body.append([name, format_bytes(whole), format_bytes(whole / 2), *seconds])
    header = ["entries", "on disk", "keys of it", "read once at 3 GB/s", "at 6 GB/s"]
    memory = {
        "resident": format_bytes((4096 + 512) * numbers * 2),
        "gathered": format_bytes(1664 * numbers * 2),
        "weights": format_bytes(8e9 * 4.5 / 8),
    }
    told = ARITHMETIC.format(layers=layers, heads=heads, size=size, tokens=tokens)
    return "\n".join([told, *table(header, body), "", MEMORY.format(**memory)])


def cost() -> dict[str, Any] | None:
    """What `mlx-snapkv bench --book` wrote, if it did."""
    return json.loads(COST.read_text(encoding="utf-8")) if COST.exists() else None


if __name__ == "__main__":
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(page(result, cost()), encoding="utf-8")
