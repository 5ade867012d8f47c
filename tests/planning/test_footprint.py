"""What a book is said to take before it is read, against what it took."""

from functools import partial

import pytest

from mlx_snapkv import SnapKV, prefill
from mlx_snapkv.engine.generate import stream_generate
from mlx_snapkv.planning.footprint import book_cost
from mlx_snapkv.policies import resolve_policy

POLICY = resolve_policy(
    policy="keydiff:budget=96,block=64 then snapkv:top_k=92,n_sink=4,n_window=32"
)


@pytest.mark.parametrize("memory", ["recall", "recall:4bit", "recall:file", "recall:file:8bit"])
def test_it_takes_what_was_said(demo_model, ask, memory):
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 700, 8)
    cost, reports = book_cost(model, POLICY, memory, len(prompt)), []
    given = {"policy": POLICY, "memory": memory, "on_report": reports.append}
    list(stream_generate(model, tokenizer, prompt, 4, **given))
    book = reports[0].book
    assert cost.tokens == book.stored == len(prompt)
    assert cost.stored_bytes == (book.file_bytes or book.stored_bytes)
    assert [disk.need for disk in cost.disks] == ([book.file_bytes] if "file" in memory else [])
    assert book.resident <= cost.resident and book.resident_bytes <= cost.resident_bytes
    assert cost.resident_bytes <= 1.25 * book.resident_bytes
    assert cost.resident == 96 + 64  # the budget, and a block before it evicts
    assert not cost.warnings


def test_what_is_read_later_adds_to_what_is_stored(demo_llama, ask):
    """And a copy that is saved on the same disk needs as much again."""
    prompt, _ = ask(demo_llama[1], 700, 8)
    cost, n = partial(book_cost, demo_llama[0], POLICY), len(prompt)
    cache, _ = prefill(demo_llama[0], prompt, POLICY, memory="recall:file")
    once = cost("recall:file", n)
    assert once.disks[0].need == sum(c.file_nbytes for c in cache)
    assert cost("recall:file", 100, n_before=n).stored_bytes * n == once.stored_bytes * 100
    for memory, copies in (("recall:file", 2), ("recall", 1)):
        saved = cost(memory, n, saved_in=once.disks[0].folder)
        assert [disk.need for disk in saved.disks] == [copies * once.stored_bytes]


@pytest.mark.parametrize(
    "policy, memory, n",
    [
        (None, "recall", 900),
        (POLICY, "drop", 900),
        (SnapKV(top_k=64), "recall:file", 900),  # reads in full
        (POLICY, "recall", 90),  # fits the budget
        (POLICY, "recall", 0),
    ],
)
def test_other_turns_are_no_books(demo_llama, policy, memory, n):
    assert book_cost(demo_llama[0], policy, memory, n) is None


def test_warnings(demo_llama):
    """A library is more than any disk has room for."""
    (short,) = book_cost(demo_llama[0], POLICY, "recall:file:4bit", 10**15).warnings
    assert "does not have enough room: " in short and "--store-dir" in short
    assert not book_cost(demo_llama[0], POLICY, "recall", 999).warnings
