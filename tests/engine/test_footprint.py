"""What a book is said to take before it is read, against what it took."""

import pytest

from mlx_snapkv.engine.footprint import book_cost
from mlx_snapkv.engine.generate import stream_generate
from mlx_snapkv.engine.prefill import read_book
from mlx_snapkv.policies import resolve_policy

POLICY = "keydiff:budget=96,block=64 then snapkv:top_k=92,n_sink=4,n_window=32"


@pytest.mark.parametrize("memory", ["recall", "recall:4bit", "recall:file", "recall:file:8bit"])
def test_it_takes_what_was_said(demo_model, ask, memory):
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 700, 8)
    policy = resolve_policy(policy=POLICY)
    cost = book_cost(model, policy, memory, len(prompt))
    reports = []
    given = {"policy": policy, "memory": memory, "on_report": reports.append}
    for _ in stream_generate(model, tokenizer, prompt, 4, **given):
        pass
    (report,) = reports
    book = report.book
    assert cost.tokens == book.stored == len(prompt)
    assert cost.stored_bytes == (book.file_bytes or book.stored_bytes)
    assert [disk.need for disk in cost.disks] == ([book.file_bytes] if "file" in memory else [])
    assert book.resident <= cost.resident and book.resident_bytes <= cost.resident_bytes
    assert cost.resident_bytes <= 1.25 * book.resident_bytes
    assert not cost.warnings


def test_what_is_read_later_adds_to_what_is_stored(demo_llama, ask):
    """And a copy that is saved on the same disk needs as much again."""
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 700, 8)
    policy = resolve_policy(policy=POLICY)
    cache, _ = read_book(model, prompt, policy, "recall:file")
    once = book_cost(model, policy, "recall:file", len(prompt))
    assert once.disks[0].need == sum(c.file_nbytes for c in cache)
    more = book_cost(model, policy, "recall:file", 100, n_before=len(prompt))
    assert more.stored_bytes * len(prompt) == once.stored_bytes * 100
    saved = book_cost(model, policy, "recall:file", len(prompt), saved_in=once.disks[0].folder)
    assert [disk.need for disk in saved.disks] == [2 * once.stored_bytes]
    held = book_cost(model, policy, "recall", len(prompt), saved_in=once.disks[0].folder)
    assert [disk.need for disk in held.disks] == [once.stored_bytes]


@pytest.mark.parametrize(
    "policy, memory, n",
    [
        (None, "recall", 900),
        (POLICY, "drop", 900),
        ("snapkv:top_k=64", "recall:file", 900),  # reads in full
        (POLICY, "recall", 90),  # fits the budget
        (POLICY, "recall", 0),
    ],
)
def test_other_turns_are_no_books(demo_llama, policy, memory, n):
    assert book_cost(demo_llama[0], resolve_policy(policy=policy), memory, n) is None


def test_warnings(demo_llama):
    """A library is more than any disk has room for."""
    model, _ = demo_llama
    (short,) = book_cost(model, resolve_policy(policy=POLICY), "recall:file:4bit", 10**15).warnings
    assert "has not enough room: " in short and "--store-dir" in short
    assert not book_cost(model, resolve_policy(policy="keydiff:budget=128"), "recall", 999).warnings
