"""The predicted disk space for entries in files equals the space they actually take."""

from functools import partial

import pytest

from mlx_snapkv import SnapKV, Sparse, prefill
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.engine.generate import stream_generate
from mlx_snapkv.planning.file_cost import file_cost
from mlx_snapkv.planning.units import format_bytes

SPARSE = Sparse(top_k=64, store="file")


def test_the_files_have_the_predicted_size(demo_model, ask):
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 700, 8)
    cost, reports = file_cost(model, SPARSE, len(prompt)), []
    given = {"on_report": reports.append, "sparse": SPARSE}
    list(stream_generate(model, tokenizer, prompt, 4, **given))
    (disk,), n = cost.disks, len(prompt)
    assert cost.tokens == n
    # The files also have the answer's first token, which was read before the entries were moved.
    assert disk.needed * (n + 1) == reports[0].file_bytes * n
    assert not cost.warnings


def test_a_saved_copy_on_the_same_disk_needs_as_much_again(demo_llama, ask, tmp_path):
    prompt, _ = ask(demo_llama[1], 700, 8)
    cost, n = partial(file_cost, demo_llama[0], SPARSE), len(prompt)
    cache, _ = prefill(demo_llama[0], prompt, sparse=SPARSE)
    (once,) = cost(n).disks
    assert once.needed == sum(c.file_nbytes for c in cache)
    assert cost(100).disks[0].needed * n == once.needed * 100
    twice = cost(n, saved_in=tmp_path)
    assert [disk.needed for disk in twice.disks] == [2 * once.needed]
    size = format_bytes(once.needed)
    assert f"at most {size} in {once.folders[0]} and {size} in {tmp_path} (" in str(twice)


@pytest.mark.parametrize(
    "setting, n",
    [
        (None, 900),
        (Compress(SnapKV()), 900),
        (Sparse(), 900),
        (Sparse(store="4bit"), 900),
        (SPARSE, 0),
    ],
)
def test_turns_without_entries_in_files_have_no_cost(demo_llama, setting, n):
    assert file_cost(demo_llama[0], setting, n) is None


def test_a_disk_without_enough_room_is_a_warning(demo_llama):
    """No disk has room for 10^15 tokens."""
    (short,) = file_cost(demo_llama[0], SPARSE, 10**15).warnings
    assert "does not have enough room: " in short and "--store-dir" in short
