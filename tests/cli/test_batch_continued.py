import signal
import subprocess
import time

import fork_helpers
from batch_file_helpers import SNAPKV, chat, read, said, write
from command_lines import MODULE

DEMO = ["--model", "demo"]


def test_a_run_from_stdin_skips_the_custom_ids_it_has_answered(batch, tmp_path):
    lines = [chat(f"{n}", n, max_tokens=7) for n in range(6)]
    data = [write(tmp_path / "r.jsonl", part).read_bytes() for part in (lines[:3], lines)]
    assert len(batch(None, stdin=b"\xef\xbb\xbf" + data[0].rstrip())[1]) == 3
    first = (tmp_path / "a.jsonl").read_bytes()
    code, found, err = batch(None, stdin=data[1].replace(b"\n", b"\r\n"))
    assert code == 0 and len(found) == 6 and "(3 of them from earlier runs)" in err
    assert (tmp_path / "a.jsonl").read_bytes().startswith(first)


MANY = [chat(f"{n}", 3 * n % 40, max_tokens=8, temperature=n % 2, seed=n) for n in range(24)]


def started(file, output, *options):
    args = ["batch", str(file), "-o", str(output), *DEMO, "--policy", SNAPKV, *options]
    return fork_helpers.Popen([*MODULE, *args], stderr=subprocess.PIPE, text=True)


def wait_for(process, output, n):
    """Wait until the output has `n` lines."""
    while not (output.exists() and output.read_bytes().count(b"\n") >= n):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_a_killed_run_continues(tmp_path):
    file = write(tmp_path / "r.jsonl", MANY)
    unbroken, output = tmp_path / "unbroken.jsonl", tmp_path / "a.jsonl"
    process = started(file, unbroken)
    process.communicate()
    process = started(file, output, "--concurrency", "3")
    for n in (5, 14):
        wait_for(process, output, n)
        process.kill()
        process.communicate()
        kept = output.read_bytes()
        assert n <= kept.count(b"\n") < len(MANY)
        with output.open("ab") as half:
            half.write(b'{"id": "batch_req_12", "custom_id": "3' + b"\0" * (n == 14))
        process = started(file, output, "--concurrency", "6")
    _, err = process.communicate()
    assert process.returncode == 0 and "of them from earlier runs)" in err
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    found, expected = read(output), read(unbroken)
    assert {k: said(r) for k, r in found.items()} == {k: said(r) for k, r in expected.items()}
    assert len(found) == len(MANY)


def test_a_second_run_on_one_file_is_refused_and_ctrl_c_says_how_to_continue(batch, tmp_path):
    file, output = write(tmp_path / "r.jsonl", MANY), tmp_path / "a.jsonl"
    process = started(file, output, "--concurrency", "2")
    wait_for(process, output, 1)
    code, _, err = batch(None, "--policy", SNAPKV)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130 and "Traceback" not in said
    assert f"The answers so far are in {output}; the same command continues from there." in said
    assert code == 2 and f"{output} is in use by another run" in err
    assert 1 <= len(read(output)) < len(MANY)


def test_answers_of_another_run_are_refused(batch):
    assert batch([chat("a", 9)], "--policy", SNAPKV)[0] == 0
    for options, words in (
        ([], f"with --policy '{SNAPKV}' instead of none"),
        (["--policy", SNAPKV, "--kv-bits", "8"], "with --kv-bits none instead of 8"),
        (
            ["--policy", SNAPKV, "--model", "demo-tasks"],
            "with --model 'demo' instead of 'demo-tasks'",
        ),
    ):
        code, _, err = batch(None, *options)
        assert code == 2 and words in err
