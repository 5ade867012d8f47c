import json
import re

from mlx_snapkv.cli.progress import StepBars


def test_progress_says_how_long_the_rest_will_take(capsys, monkeypatch):
    """Without a terminal, a line is printed now and then."""
    now = 0.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    with StepBars() as bars:
        bars.start("documents", 12)
        bars.count_step()
        for seconds in (60, 20, 20):
            now += seconds
            bars.count_step()
    assert capsys.readouterr().err.splitlines() == [
        "documents 2/12, 60 s, about 600 s left",
        "documents 4/12, 100 s, about 267 s left",
    ]


def test_fidelity_prints_a_table_for_each_setting_and_more_pieces_continue_a_run(
    call, refused, text_file, tmp_path
):
    """There are two texts with two pieces each. A picture in their folder is skipped."""
    base, folder = tmp_path / "r", tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        text_file(folder / f"{name}.txt", 380, name)
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\0")
    args = ["eval", "fidelity", "--text", str(folder), "--length", "150", "--continuation", "16"]
    args += ["--policy", "streaming_llm:budget=25%,schedule=once", "--output", str(base)]
    args += "--setting text --setting later --question Who? --question Where?".split()
    code, out, err = call(*args, "--documents", "1")
    assert (
        code == 0
        and "Text after the piece" in out
        and "Skipped files that are not UTF-8 text: 1." in err
    )
    assert re.search(r"documents 1/1, \d+ s", err)
    before = (tmp_path / "r.jsonl").read_bytes()
    code, out, _ = call(*args, "--documents", "2", "--policy", "random:budget=25%,schedule=once")
    after = (tmp_path / "r.jsonl").read_bytes()
    assert code == 0 and after.startswith(before) and "replaced" in out
    assert "Pieces: 2; texts: 2; tokens scored: 32." in out
    full = next(line.split() for line in out.splitlines() if "100.0%" in line)
    assert "0" in full and "151" in full
    assert re.search(r"0\.\d{3}", out)
    assert not re.search(r"0\.\d{3} \(", out)  # two texts have no interval
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["records"]) == 2 * 2 * 3 == len(after.splitlines()) - 1
    asked = [r["question"] for r in result["records"] if r["setting"] == "later"]
    assert asked == ["Who?"] * 3 + ["Where?"] * 3  # each piece has its own question
    assert (tmp_path / "r.md").read_text().count("\n## ") == 2
    (folder / "picture.png").rename(folder / "now.txt").write_text("It is text now.")
    assert "belongs to another run, with texts" in refused(*args)
