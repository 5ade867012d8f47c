import json

SMALL = ["--model", "demo", "--context", "1024", "-p", "1024,3000", "-n", "1", "--steps", "1"]


def test_bench_prints_tables_and_writes_files(call, tmp_path):
    """Only the requested policies are measured."""
    base, given = tmp_path / "result", ["--policy", "snapkv:top_k=40,n_window=20"]
    given += ["--policy", "keydiff:budget=2000", "--output", str(base)]
    code, out, err = call("bench", *SMALL, *given)
    assert code == 0, err
    assert "Decoding and prefill by context length" in out and "…" not in out and "6.25%" not in out
    assert "decoding 1/1" in err and "reading 2/2" in err
    result = json.loads(base.with_suffix(".json").read_text())
    assert result["command"].startswith("mlx-snapkv bench --model demo --context 1024")
    assert {"versions", "commit", "machine"} <= set(result)
    found = {(row["context"], row["contender"].partition(":")[0]) for row in result["speed"]}
    assert {(1024, "snapkv"), (3000, "keydiff")} <= found
    page = base.with_suffix(".md").read_text()
    assert page.startswith("# Benchmarks\n\nWritten by `mlx-snapkv bench --model demo")


def test_the_help_names_the_least_lengths(call):
    _, out, _ = call("bench", "--help")
    assert " ".join(out.split()).count(", at least 1024.") == 2


def test_stores_other_than_memory_are_refused(call):
    code, out, err = call("bench", *SMALL, "--sparse", "top_k=40,store=8bit")
    assert code == 2 and not out
    assert "bench decodes from unquantised entries in memory: drop store=8bit from" in err
