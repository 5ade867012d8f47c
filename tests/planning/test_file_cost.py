"""The predicted disk space for entries in files equals the space they actually take."""

import os
import shutil
from functools import partial
from pathlib import Path

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
    assert f"at most {size} in {once.folders['--store-dir']} and {size} in {tmp_path} (" in str(
        twice
    )


@pytest.mark.parametrize(
    "setting, n",
    [
        (None, 900),
        (Compress(SnapKV()), 900),
        (Sparse(), 900),
        (Sparse(store="8bit"), 900),
        (SPARSE, 0),
    ],
)
def test_turns_without_entries_in_files_have_no_cost(demo_llama, setting, n):
    assert file_cost(demo_llama[0], setting, n) is None


def test_a_disk_without_enough_room_is_a_warning(demo_llama, tmp_path):
    """No disk has room for 10^15 tokens."""
    (short,) = file_cost(demo_llama[0], SPARSE, 10**15).warnings
    assert "there is not enough room in " in short and "another disk with --store-dir, or" in short
    (short,) = file_cost(demo_llama[0], SPARSE, 10**15, saved_in=tmp_path).warnings
    assert f" and {tmp_path}: " in short and "with --store-dir or --output, or" in short


def test_the_warning_names_the_full_disk_and_the_flag_that_chooses_another(
    demo_llama, tmp_path, monkeypatch
):
    """Files are written to one disk, and the copy to another, which is full."""
    full = tmp_path / "full"
    full.mkdir()
    stat, usage = Path.stat, shutil.disk_usage(tmp_path)

    def stat_of_two_disks(path, **options):
        result = stat(path, **options)
        return (
            result
            if path != full
            else os.stat_result((*result[:2], result.st_dev + 1, *result[3:10]))
        )

    monkeypatch.setattr(Path, "stat", stat_of_two_disks)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=0 if path == full else 10**18)
    )
    (short,) = file_cost(demo_llama[0], SPARSE, 1000, saved_in=full).warnings
    assert (
        f"there is not enough room in {full}: " in short
        and "another disk with --output, or" in short
    )
