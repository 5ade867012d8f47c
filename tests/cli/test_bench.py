import json

SMALL = ["--model", "demo", "--context", "1024", "-p", "1024", "-n", "1", "--steps", "1"]


def test_table_files_and_picture(call, tmp_path):
    base = tmp_path / "folder" / "result"
    code, out, err = call("bench", *SMALL, "--long-prompts", "3000", "--output", str(base))
    assert code == 0, err
    assert "Decoding and reading by context length" in out and "…" not in out
    assert "decoding 1/1" in err and "reading 2/2" in err
    result = json.loads(base.with_suffix(".json").read_text())
    assert result["command"].startswith("mlx-snapkv bench --model demo --context 1024")
    assert {"versions", "commit", "machine"} <= set(result)
    found = {(row["context"], row["contender"]) for row in result["speed"]}
    assert {(1024, "snapkv:budget=6.25%"), (3000, "keydiff:budget=2048")} <= found
    assert "](<result.png>)" in (base.with_suffix(".md").read_text())
    assert base.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_policies_given_are_measured_and_no_others(call):
    given = ["--snapkv", "top_k=40,n_window=20", "--policy", "tova:budget=50"]
    code, out, _ = call("bench", *SMALL, "--long-prompts", "", *given)
    assert code == 0 and "tova:budget=50" in out and "snapkv:top_k=40" in out
    assert "keydiff" not in out and "6.25%" not in out
