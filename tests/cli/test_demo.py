import re
import shlex

SMALL = ["demo", "--tokens", "1024", "--questions"]


def test_the_demo_shows_kept_and_evicted_facts_and_the_speed(call, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    save = ["--save-document", "a story.txt"]
    code, out, _ = call(*SMALL, "2", *save)
    rows = [line.split("│")[1:-1] for line in out.splitlines() if "│" in line]
    first, second, right, entries, memory = ([cell.strip() for cell in row] for row in rows)
    assert code == 0 and [cell.split()[0] for cell in first[2:]] == ["right"] * 3
    assert [cell.split()[0] for cell in second[2:]] == ["right", "wrong", "right"]
    assert right[2:] == ["2/2", "1/2", "2/2"] and entries[3] == entries[4] == "64"
    assert memory[2].endswith(" MB") and memory[3].endswith(" kB") and memory[4] == memory[2]
    speeds = re.findall(
        r" (kept|read) [\d.]+ ms and [\d.]+ MB \(([\d.]+) times as fast\)", " ".join(out.split())
    )
    assert [name for name, _ in speeds] == ["kept", "read"]
    assert all(float(times) > 0 for _, times in speeds)
    assert "compare --model MODEL" in out
    asked = shlex.split(out.splitlines()[-1])
    assert call(*asked[asked.index("generate") :])[1].strip() == first[1]
    (tmp_path / "a story.txt").write_text("mine")
    code, out, err = call(*SMALL, "2", *save)
    assert (code, out) == (2, "") and "a story.txt: the file exists with other content" in err
    assert (tmp_path / "a story.txt").read_text() == "mine"
