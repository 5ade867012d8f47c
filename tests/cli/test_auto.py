import json

import pytest
from batch_file_helpers import COMPLETIONS, line

from mlx_snapkv import KeyDiff, SnapKV, Sparse
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.planning import auto
from mlx_snapkv.planning.config import CompressionConfig

SPARSE = CompressionConfig(Sparse(top_k=64, when="always"))
SMALL = CompressionConfig(Compress(SnapKV(top_k=64, lookahead=0)))
BLOCKS = CompressionConfig(Compress(KeyDiff(budget=256, block=64)))
AUTO = ["--model", "demo", "--policy", "auto"]


@pytest.fixture
def few(monkeypatch):
    """Make auto compress prompts of 300 tokens or more, and recommend 64 entries."""
    monkeypatch.setattr(auto, "MIN_TOKENS_TO_EVICT", 300)
    monkeypatch.setattr(auto, "SPARSE", SPARSE)
    for task in auto.CANDIDATES:
        first = SMALL if task == auto.BATCH else SPARSE
        monkeypatch.setitem(auto.CANDIDATES, task, (first, BLOCKS))


def test_generate_prints_the_setting_that_auto_selects_and_why(call, story, few):
    path, facts = story
    asked = ["generate", *AUTO, "--prompt-file", str(path), "-p", facts[0].question]
    code, out, err = call(*asked)
    assert (code, out.strip()) == (0, facts[0].value)
    assert f"auto: {SPARSE}, because all entries fit in memory" in err
    assert "72 entries and 6 means of the rest read by every token" in err
    code, out, err = call(*asked, "--kv-memory", "3MB")
    assert "auto: keydiff:" in err and "would take" in err and "3 MB is available" in err
    bits = "--kv-bits 8 --kv-group-size 32 --quantized-kv-start 9"
    code, _, err = call(*asked, "--kv-memory", "2.5MB", *bits.split())
    assert code == 0 and "note: --quantized-kv-start does nothing here" in err
    assert "auto: keydiff:" in err and "this prompt uses keydiff:" in err


@pytest.mark.parametrize("more", ["--store memory", "--store 8bit"])
def test_a_short_prompt_keeps_the_full_cache(call, more):
    asked = ["-p", "Hello", "-m", "2", *more.split()]
    code, _, err = call("generate", *AUTO, *asked)
    assert code == 0 and "auto: the full cache, because at 6 tokens" in err
    assert "prompt tokens, full cache | prompt " in err
    report = json.loads(call("generate", *AUTO, *asked, "--json")[1])["compression"]
    assert report["reason"].startswith("at 6 tokens reading all entries costs little")
    assert report["auto"] == f"auto: the full cache, because {report['reason']}"


def test_a_chat_and_a_batch_use_the_setting_that_auto_selects(call, batch, story, few):
    path, facts = story
    code, out, err = call(
        "chat", *AUTO, stdin=f"/file {path}\n{facts[0].question}\n/stats\n".encode()
    )
    assert (code, out.strip()) == (0, facts[0].value)
    assert f"auto: {SPARSE}, because all entries fit in memory" in err
    assert "means of the rest read by every token" in err
    code, records, err = batch([line("a", COMPLETIONS, prompt=path.read_text())], *AUTO[2:])
    assert code == 0 and f"auto: {SMALL}, because the question chooses" in err
    assert records["a"]["response"]["body"]["mlx_snapkv"]["entries"] == 90


def test_auto_is_ignored_or_refused_where_there_is_nothing_to_select(
    save, ask_saved, refused, story, tmp_path
):
    (text, facts), saved = story, tmp_path / "saved.safetensors"
    save(text, saved)
    code, out, err = ask_saved(saved, facts[0].question, *AUTO[2:])
    assert (code, out.strip()) == (0, facts[0].value)
    assert f"note: --policy auto has no effect on {saved}" in err
    assert "policy auto works only in generate, chat, batch, serve and plan: name" in refused(
        "compare", *AUTO, "--prompt-file", str(text)
    )
    assert "--policy auto and --sparse both say how" in refused("generate", *AUTO, "--sparse", "")
