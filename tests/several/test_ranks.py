"""Two processes that share a model keep the same entries and give the same answers as one process."""

import json
import subprocess
import sys
from pathlib import Path

import fork_helpers
import pytest
from batch_file_helpers import COLD, FACT
from several_cases import ANSWERS, POLICIES, run
from several_helpers import LIMIT, ROOT, first_of_free_ports, started

KINDS = {"tensor": "demo", "pipeline": "demo-qwen3-next"}


@pytest.fixture(scope="module", params=KINDS)
def found(request, tmp_path_factory):
    """Return how the model is shared, the results of one process, and the results of two."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    for code, said in started(folder, "several_cases", str(folder), KINDS[kind], kind):
        assert code == 0, said
    two = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    model = request.getfixturevalue("demo_llama" if kind == "tensor" else "demo_qwen")
    return kind, run(*model), two


@pytest.mark.parametrize("name", [*POLICIES, *ANSWERS])
def test_two_processes_keep_and_answer_as_one(found, name):
    kind, one, two = found
    if name in ANSWERS:
        assert two[0].get(name) == two[1].get(name) == one.get(name)
        return
    one, two = one[name], [rank[name] for rank in two]
    first, second = (rank["kept"] for rank in two)
    if kind == "tensor":
        assert [heads + more for heads, more in zip(first, second)] == one["kept"]
    else:  # rank 0 has the last layers
        assert second + first == one["kept"]
    assert two[0]["said"] == two[1]["said"] == one["said"]
    assert sum(rank["kv_bytes"] for rank in two) == one["kv_bytes"]


def test_a_policy_whose_heads_agree_needs_all_heads_of_a_layer(found):
    kind, one, two = found
    if kind == "tensor":
        assert all("tova keeps the same entries in all heads" in rank["tova"] for rank in two)
    else:
        assert two[1]["tova"]["kept"] + two[0]["tova"]["kept"] == one["tova"]["kept"]


def test_a_prompt_cache_is_not_saved(found):
    _, _, two = found
    for rank in two:
        assert "prompt caches can't be saved on several Macs: start it without" in rank["saved"]


LAUNCH = str(Path(sys.executable).with_name("mlx.launch"))
POLICY = "snapkv:budget=128,n_sink=4,n_window=32,lookahead=4"


def one(*command, **options):
    command = [sys.executable, "-m", "mlx_snapkv", *command]
    return fork_helpers.run(command, capture_output=True, text=True, check=True, **options).stdout


def test_two_processes_print_once_what_one_prints(ask, demo_llama, tmp_path):
    tokens, fact = ask(demo_llama[1], 600, 3)
    path = tmp_path / "story.txt"
    path.write_text(demo_llama[1].decode(tokens).split(fact.question)[0])
    command = ["generate", "--model", "demo", "--prompt-file", str(path), "--prompt", fact.question,
               "--policy", POLICY, "--json"]  # fmt: skip
    launch = [LAUNCH, "-n", "2", "--backend", "ring", "--starting-port", str(first_of_free_ports(2)),
              "--env", f"PYTHONPATH={ROOT}", "--", sys.executable, "-m", "mlx_snapkv", *command]  # fmt: skip
    two = subprocess.run(launch, capture_output=True, text=True, timeout=LIMIT)
    found, wanted = json.loads(two.stdout), json.loads(one(*command))
    assert found["text"] == wanted["text"]
    assert found["compression"]["entries_kept"] == wanted["compression"]["entries_kept"]
    assert two.stderr.count("prompt tokens,") == 1


def test_two_processes_chat_as_one(tmp_path):
    file, question = tmp_path / "facts.txt", "What is the access code of the amber falcon?"
    file.write_text(FACT + COLD * 40)
    lines = "\n".join([f"/file {file}", question, "/undo", question, "/quit"])
    command = ["chat", "--model", "demo-qwen3-next", "--policy", POLICY]
    wanted = one(*command, input=lines)
    assert wanted.count("482913") == 2
    ranks = started(tmp_path, "mlx_snapkv", *command, "--pipeline", lines=lines)
    assert [code for code, _ in ranks] == [0, 0], ranks
    answers = [line for line in ranks[0][1].splitlines() if "482913" in line]
    assert answers == wanted.split() and "482913" not in ranks[1][1]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["batch", "r.jsonl", "-o", "a.jsonl"], "mlx-snapkv batch does not run on several Macs"),
        (["serve", "--prefix-dir", "known"], "--prefix-dir can't be used on several Macs"),
        (["serve", "--pipeline"], "--pipeline can't be used on several Macs: drop it"),
        (["generate", "--prompt", "x", "--prompt-cache-file", "a.safetensors"],
         "saved prompt caches can't be loaded on several Macs: start it without mlx.launch"),
        (["generate", "--model", "demo-qwen3-next", "--prompt", "x"], "add --pipeline"),
    ],
)  # fmt: skip
def test_unsupported_commands_are_refused_by_all_ranks(tmp_path, monkeypatch, command, sentence):
    monkeypatch.chdir(tmp_path)
    Path("r.jsonl").write_text("{}\n")
    if "--model" not in command:
        command = [*command, "--model", "demo"]
    for code, printed in started(tmp_path, "mlx_snapkv", *command, limit=60):
        assert code == 2 and sentence in printed and "Traceback" not in printed
