"""Which policy and memory to take for what: the table of `mlx-snapkv policies --choose` and of docs/choose.md."""

from __future__ import annotations

from dataclasses import dataclass

# About what the measurements had; SnapKV's own defaults are for prompts of more than 49,152 tokens. A question about
# several facts is longer.
_ENDS = "n_sink=4,n_window=32"
_LONGER_ENDS = "n_sink=4,n_window=48"


@dataclass(frozen=True)
class Choice:
    """One row.

    Attributes:
        name: what docs/choose.md looks its figures up by.
        when: the situation, in a few words.
        why: a sentence.
        command: to paste, with MODEL, TEXT and QUESTION to be filled in.
        pages: the tables that support it, by their places in docs/.
    """

    name: str
    when: str
    why: str
    command: str
    pages: tuple[str, ...]


CHOICES = (
    Choice(
        "one",
        "one question at the end",
        "The question's own tokens vote; the layers share the budget by need.",
        "mlx-snapkv generate --model MODEL --prompt-file TEXT --prompt QUESTION "
        f"--snapkv budget=adaptive:12.5%,{_ENDS}",
        ("quality.md#18-of-the-entries-question-known",),
    ),
    Choice(
        "several",
        "several facts in one question, or one through another",
        "All entries stay at hand, and doubtful tokens vote again over all of them.",
        "mlx-snapkv generate --model MODEL --prompt-file TEXT --prompt QUESTION "
        f"--snapkv budget=6.25%,{_LONGER_ENDS} --memory recall --verify unsure",
        ("quality.md#116-of-the-entries-question-known", "answers.md#what-they-find"),
    ),
    Choice(
        "many",
        "many questions of one document",
        "Every question chooses again from all entries; answers are decoded from few.",
        f"mlx-snapkv chat --model MODEL --snapkv budget=6.25%,{_ENDS} --memory recall",
        ("turns.md#demo",),
    ),
    Choice(
        "later",
        "a document saved once, for questions that nobody knows yet",
        "The document is read twice, and what it needs to be said again is kept; `snapkv` would need the question.",
        "mlx-snapkv cache-prompt --model MODEL --prompt-file TEXT -o TEXT.safetensors "
        "--policy kvzip:budget=adaptive:25%",
        ("quality.md#14-of-the-entries-question-later",),
    ),
    Choice(
        "agent",
        "an agent, or several clients at once",
        "What prompts have in common is read once; small caches are decoded together.",
        f"mlx-snapkv serve --model MODEL --snapkv budget=6.25%,{_ENDS} --memory recall",
        ("benchmarks-batches.md#many-prompts-at-once", "turns.md#demo"),
    ),
    Choice(
        "book",
        "a book: more than fits in memory",
        "It is read within a budget, every entry goes to disk, and every question votes over all of them.",
        "mlx-snapkv chat --model MODEL --memory recall:file "
        f'--policy "keydiff:budget=4096 then snapkv:top_k=1024,{_ENDS}"',
        ("book.md#demo-4096-tokens", "benchmarks-book.md#reading-a-book"),
    ),
    Choice(
        "long",
        "long answers",
        "`on_full=keydiff`, the default: the answer's own entries compete with the prompt's; the shape is fixed.",
        "mlx-snapkv generate --model MODEL --prompt-file TEXT --prompt QUESTION "
        "--snapkv budget=25%,n_sink=4,n_window=128 --max-tokens 4096",
        ("long-answers.md#demo-1024-tokens-budget256-n_sink4-n_window128-min_ctx0",),
    ),
    Choice(
        "hybrid",
        "a hybrid (Qwen3-Next, Qwen3.5): linear and full attention",
        "Only the full-attention layers have entries to drop. `--verify all` can't be had, `unsure` can.",
        f"mlx-snapkv chat --model MODEL --snapkv budget=6.25%,{_ENDS} --memory recall",
        ("turns.md#demo-qwen3-next", "kv-bits.md#demo-qwen3-next"),
    ),
    Choice(
        "small",
        "a small Mac: the least memory while reading and after",
        "Read within a budget, then chosen by the question, and kept in 4 bits. What is dropped is gone.",
        "mlx-snapkv generate --model MODEL --prompt-file TEXT --prompt QUESTION --kv-bits 4 "
        f'--policy "keydiff:budget=12.5%,block=256 then snapkv:budget=6.25%,{_ENDS}"',
        ("kv-bits.md#demo", "benchmarks.md#reading-within-a-fixed-budget"),
    ),
)
