"""What docs/quality.md says between its tables. Figures in braces are filled in by `quality_page`."""

INTRO = """\
# What each policy finds

{written_by}

**No real checkpoint was measured.** Below is what two embedded models of one or two million parameters answer, which
do nothing but look facts up in synthetic documents of {length:,} tokens. It tells policies apart; it does not say what
a summary or an argument would be worth, nor that the order stays the same on a large model. Measure yours with
`mlx-snapkv eval suite` or `eval data`: [measuring.md](measuring.md).

## Which policy for what

- **One question at the end of a prompt that fits in memory**: `snapkv`, with `budget=adaptive:...`. At 1/8 it has
  {known[snapkv, adaptive, 1/8]} where equal budgets have {known[snapkv, 1/8]} (full cache {known[full cache]}),
  six-digit codes at 1/32 {needles[snapkv, adaptive, 1/32]} against {needles[snapkv, 1/32]}, chains over two links at
  1/8 {two_links[snapkv, adaptive, 1/8]} against {two_links[snapkv, 1/8]}, and nowhere is the
  mean worse. Single facts are found down to 1/32, several down to 1/16, chains over three links at 1/8. What counts is
  how many entries are kept, not what share of the prompt: equal budgets of 1/8 of {longer_length:,} tokens have
  {longer[snapkv, 1/8]}.
- **Chains, many facts, or to be sure**: `--memory recall --verify unsure`, at 1/16
  {known[snapkv, recall, unsure, 1/16]} where `snapkv` alone has {known[snapkv, 1/16]}, and
  {later[snapkv, recall, unsure, 1/16]} when the question comes later. Without a memory `lookahead=32` comes to
  {options[snapkv, lookahead=32, 1/16]} there: the answer's first 32 tokens are decoded on all entries, which here is
  nearly all of it, and vote too. They take the time of the full cache's.
- **Questions that nobody knows yet, nothing kept beside** (`cache-prompt`, a chat with `drop`): a quarter of the
  entries, by `kvzip:budget=adaptive:25%`, {later[kvzip, adaptive, 1/4]}, which reads the text twice, or KeyDiff,
  {later[keydiff, 1/4]}. At 1/8 give KeyDiff `pool_kernel=5`: {later[keydiff, pool_kernel=5, 1/8]} against
  {later[keydiff, 1/8]}; as good as `kvzip`, {later[kvzip, adaptive, 1/8]}, which needs `adaptive` there
  ({later[kvzip, 1/8]} without). Never `snapkv`, {later[snapkv, 1/4]} at 1/4. At 1/16 nothing is good without a memory.
- **A prompt too long for memory**: `keydiff` with `pool_kernel=5`, the question known too
  ({known[keydiff, pool_kernel=5, 1/8]} at 1/8). With `--memory recall:file --verify unsure` it forgets nothing:
  {later[book, unsure, 1/16]} at 1/16 resident.
- **Not `keydiff:budget=adaptive:...`**: its scores can't be compared between layers,
  {later[keydiff, pool_kernel=5, once, adaptive, 1/8]} at 1/8.
- **Head-wise budgets** (AdaKV) would have {masks[adakv of snapkv, 1/16]} at 1/16 and {masks[adakv of snapkv, 1/32]}
  at 1/32, budgets by layer {masks[snapkv, adaptive, 1/16]} and {masks[snapkv, adaptive, 1/32]}. They are only measured
  as a mask: stored beside each other, heads of different lengths take the room of the longest.
- **`critical=true`**: nowhere better, with `adaptive` or without.
- **All others** are controls: none finds more than {others} at the largest budget it was asked at.
"""

HOW = """
![Right answers by budget](quality.png)

## How it was asked

- Tasks of `mlx-snapkv eval suite`: {tasks}.
  {asked} questions a cell at least, the same for every way; an answer is right if it is the value and nothing else.
  *Right* is the mean over the tasks, each weighing the same.
- Differences are paired, question by question, with a 95% interval bootstrapped over documents. An interval that holds
  0 is no difference that these questions can tell.
- *Known*: the question stands in the prompt that is compressed. *Later*: the document is read and compressed first,
  and its questions come one by one to what is left.
- The budget is a share of the prompt's entries, kept per KV head. SnapKV has `n_sink=4` and
  `n_window=48`, or 32 of 1/32 of the entries, of codes, in a book and where the question comes later, since its
  defaults are larger than these budgets. KeyDiff reads blocks of 256 tokens. Two stages read within four times the
  entries kept, half of the prompt at most. All else scores the whole prompt once (`schedule=once`), with its
  defaults.
- The question known, SnapKV decodes five answer tokens on all entries (`lookahead=4`), what else scores once two, and
  block policies none. Codes have 4 to 10 tokens, several facts and chains 20 to 40.
- With `recall` every entry stays available, and `unsure` lets doubtful tokens vote again over all of them. A book has
  as many entries in memory as the others, besides a block of 256 while it reads, and all in a file.
- *Entries* are those of the layer that keeps most, KV memory is all that is held in memory when the answer is done.
  Times are left out: the machine was not idle.
- {commits}.
"""

NEEDLES = """\
## Six-digit codes: budgets by layer

`demo`, {length:,} tokens, the question known; four access codes in each document, all asked for. `lookahead=0`: no
digit but the first is decoded on all entries, so this is what the selection alone is worth.
"""

HYBRID = """\
## The same of a hybrid

`demo-qwen3-next`, whose linear layers keep what they have read whatever becomes of the entries of the others.
"""

LONGER = """\
## Longer documents

The tasks at {longer_length:,} tokens, and *two-links*, the question known. Longer is left out: this model was trained
to 6,144 tokens, and at 8,192 its full cache fails three of the six.
"""

TWO_LINKS = """\
## Chains over two links

At {length:,} tokens; *three-links* is in the tables above.
"""

MASKS = """\
## Head-wise budgets

What heads that keep different numbers of entries would answer, measured by mask: all entries are held, and at decoding
each KV head sees its own (`eval suite --by-mask`). AdaKV gives a layer's budget to the best entries of all its heads,
FastGen's heads keep what they need for a share of the prompt's attention. *Entries* are the mean of all heads; the
memory is the full cache's.
"""

OPTIONS = """\
## SnapKV's options

One option changed at a time, 1/16 of the entries, the question known. `snapkv` has the defaults,
`lookahead=4,pool_kernel=21`; `heads=shared,last_token=false`, with no `lookahead`
either, is how SnapKV was first written for mlx-lm. Half of the recent window gives way to the answer's first
tokens, before any choice: of 48 entries that is what stood before the question, of `n_window=32` the question's
beginning. Let the window be half as long again as a question; the default is 512.
"""

KERNELS = """\
## KeyDiff's pooling

The question later. `keydiff` has the default, `pool_kernel=1`, which pools nothing, as in the paper.
"""

# By part: what it begins with, and what the tables of its budgets are headed by; None is one table.
SECTIONS = {
    "known": ("## The question known\n", "question known"),
    "later": ("## The question later\n", "question later"),
    "longer": (LONGER, "{longer_length:,} tokens"),
    "two_links": (TWO_LINKS, "two links"),
    "needles": (NEEDLES, "six digits"),
    "hybrid": (HYBRID, "six digits, hybrid"),
    "masks": (MASKS, None),
    "options": (OPTIONS, None),
    "kernels": (KERNELS, "KeyDiff"),
}

LEFT_OUT = """\
## What was left out

- Real checkpoints, contexts above {longer_length:,} tokens, and harder tasks of the hybrid model, which has learned
  single facts.
- The controls (crosses in the picture) at smaller budgets, and most of them with the question known, where 18 questions
  each, at 1/8, found next to nothing.
- `kvzip` with the question known, since it asks nothing of the question, and at 1/16.
- Pyramids, `mass`, `verify=all` (the full cache's answers by construction: [answers.md](answers.md)) and fewer bits
  ([kv-bits.md](kv-bits.md)).
"""
