"""Which policy and memory to take for what: the table of `mlx-snapkv policies --choose` and of docs/choose.md."""

from __future__ import annotations

from dataclasses import dataclass

ASK = "mlx-snapkv generate --model MODEL --prompt-file TEXT --prompt QUESTION"


@dataclass(frozen=True)
class Choice:
    """One row.

    Attributes:
        when: the situation, in a few words.
        why: a sentence.
        command: to paste, with MODEL, TEXT and QUESTION to be filled in.
        pages: the tables that support it, by their places in docs/.
    """

    when: str
    why: str
    command: str
    pages: tuple[str, ...]


CHOICES = (
    Choice(
        "no setting in mind",
        "It takes what suits the prompt, the task and this machine of what is below, and says which and why.",
        f"{ASK} --policy auto",
        ("choose.md#commands",),
    ),
    Choice(
        "one question about a long text, such as a contract of 100,000 tokens",
        "The question's own tokens vote for the entries that the answer needs.",
        f"{ASK} --snapkv top_k=4096",
        ("quality.md",),
    ),
    Choice(
        "a chat, several questions about one text",
        "All entries stay in memory, and every token of an answer chooses which it reads.",
        "mlx-snapkv chat --model MODEL --snapkv top_k=4096 --memory recall",
        ("recall.md#what-conversations-find",),
    ),
    Choice(
        "an agent, or several clients at once",
        "What prompts have in common is read once; add --refresh turn where many ask at once.",
        "mlx-snapkv serve --model MODEL --snapkv top_k=4096 --memory recall",
        ("server.md#beside-mlx-lms-server", "recall.md#what-conversations-find"),
    ),
    Choice(
        "many documents overnight",
        "Each prompt is read and compressed by itself, and small caches are decoded together.",
        "mlx-snapkv batch requests.jsonl -o answers.jsonl --model MODEL --snapkv top_k=4096",
        ("batches.md#what-it-gains",),
    ),
    Choice(
        "an answer that must equal the full cache's",
        "Tokens are drafted from few entries, and checked on all.",
        f"{ASK} --snapkv top_k=4096 --memory recall --verify all",
        ("recall.md#what-an-answer-reads",),
    ),
    Choice(
        "a text too long for memory, such as a book",
        "It is read within a budget, every entry goes to a file, and every question votes over all of them.",
        "mlx-snapkv chat --model MODEL --memory recall:file "
        '--policy "keydiff:budget=4096 then snapkv:top_k=1024"',
        ("recall.md#books", "benchmarks.md#books"),
    ),
    Choice(
        "a document saved small, for questions that nobody knows yet",
        "The attention of all its queries counts. What is evicted is gone: keep all entries if there is room.",
        "mlx-snapkv cache-prompt --model MODEL --prompt-file TEXT -o TEXT.safetensors "
        "--policy h2o:budget=25%,schedule=once",
        ("quality.md",),
    ),
    Choice(
        "the least memory, while reading and after",
        "Read within a budget, chosen by the question, and kept in 4 bits. What is evicted is gone.",
        f'{ASK} --kv-bits 4 --policy "keydiff:budget=8192 then snapkv:top_k=2048"',
        ("choose.md#fewer-bits-as-well", "benchmarks.md#decoding-and-reading"),
    ),
)
