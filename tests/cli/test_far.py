import pytest
from model_folders import demo_with

LENGTH = 512
THEN = "keydiff:budget=96,block=128,n_sink=4 then snapkv:top_k=60,n_sink=4,n_window=32"
BEYOND = f"more than the model's trained length of {LENGTH}: answers may be wrong"


@pytest.mark.parametrize("way", [["--policy", THEN], ["--sparse", "budget=12.5%,read_top_k=128"]])
def test_entries_are_pulled_together_where_a_chunk_reads_little(call, text_file, tmp_path, way):
    model = ["--model", str(demo_with(tmp_path / "model", max_position_embeddings=LENGTH))]
    book, (fact, *_) = text_file(tmp_path / "book.txt", 3 * LENGTH, seed=2)
    ways = [*way, "-m", "12"]
    asked = ["generate", *model, "--prompt-file", str(book), "--prompt", fact.question]
    code, out, err = call(*asked, *ways)
    pulled = f"positions compacted to the trained length of {LENGTH} tokens"
    assert code == 0 and fact.value in out and pulled in err.splitlines()[-1] and BEYOND not in err
    assert pulled not in call(*asked, *ways, "--far", "keep")[2]
    lines = f"/file {book}\n{fact.question}\n/stats\n".encode()
    code, out, err = call("chat", *model, *ways, "--far", "pull", stdin=lines)
    assert code == 0 and fact.value in out and pulled in err
    saved = ["--prompt-file", str(book), "-o", str(tmp_path / "x.safetensors")]
    assert (
        pulled in call("cache-prompt", *model, *saved, *(w.partition(" then")[0] for w in way))[2]
    )


def test_what_is_read_whole_beyond_the_trained_length_is_told_what_helps(call, text_file, tmp_path):
    model = ["--model", str(demo_with(tmp_path / "model", max_position_embeddings=LENGTH))]
    book, (fact, *_) = text_file(tmp_path / "book.txt", 3 * LENGTH // 2, seed=2)
    asked = ["generate", *model, "--prompt-file", str(book), "--prompt", fact.question]
    helps = "; sparse attention keeps distances shorter, and so does a policy such as keydiff:budget=4096"
    left = [*asked, "-m", "1", "--snapkv", "top_k=60"]
    assert f"{BEYOND}{helps}" in call(*left)[2]
    assert BEYOND not in call(*left, "--far", "keep")[2]
    assert BEYOND in call("chat", *model, stdin=f"/file {book}\n".encode())[2]
