import json

import pytest
from command_lines import LEAD

ASK = ["generate", "--ignore-chat-template", "--prompt", LEAD]
FILE = """
model = "demo"
policy = "keydiff:budget=16,n_sink=4,n_window=8"
api-key = "very secret"
max-tokens = 9

[generate]
max-tokens = 6
json = true

[plan]
memory = "16GB"

[eval.fidelity]
setting = ["text", "later"]
"""


@pytest.fixture
def run(call, tmp_path, monkeypatch):
    """Return a function that writes the config file and runs a command, and returns (exit code, stdout, stderr).

    The config file's path appears as FILE in stderr.
    """
    path = tmp_path / "mlx-snapkv" / "config.toml"

    def command(text, *args, stdin=b"", **variables):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        with monkeypatch.context() as patch:
            for name, value in {"XDG_CONFIG_HOME": str(tmp_path), **variables}.items():
                patch.setenv(name, value)
            code, out, err = call(*args, stdin=stdin)
        return code, out, err.replace(str(path), "FILE")

    return command


def test_flags_override_variables_and_variables_override_the_file(run):
    def asked(*args, **variables):
        code, out, _ = run(FILE, *ASK, *args, **variables)
        found = json.loads(out)
        return code, found["compression"]["policy"].partition(",")[0], found["generation_tokens"]

    variables = {"MLX_SNAPKV_MAX_TOKENS": "3", "MLX_SNAPKV_SNAPKV": "top_k=4"}
    assert asked() == (0, "keydiff:n_window=8", 6)
    assert asked(**variables) == (0, "snapkv:top_k=4", 3)
    assert asked("-m", "2", "--policy", "none", **variables) == (0, "none", 2)


def test_a_variable_alone_names_the_model(run):
    options = [*ASK, "-q", "-m", "6"]
    assert run("", *options, MLX_SNAPKV_MODEL="demo") == (0, "482913\n", "")
    code, out, err = run("", *options)
    assert (code, out) == (2, "") and "--model" in err
    assert run("", "config", XDG_CONFIG_HOME="/dev/null")[0] == 0


def test_a_key_of_several_commands_is_used_by_the_commands_that_accept_its_value(run):
    code, out, _ = run("policy = 'auto'\n", "config")
    assert code == 0 and out.endswith(": generate, chat, batch, serve, plan\n")
    asked = ["compare", "--model", "demo", "--prompt", LEAD, "-m", "2", "--json", "-q"]
    code, out, _ = run("policy = 'keydiff'\n", *asked, MLX_SNAPKV_POLICY="none")
    assert code == 0 and [x["name"] for x in json.loads(out)["methods"]][1] != "keydiff"
    code, out, _ = run("policy = 'keydiff'\n", *asked, "--policy", "none")
    assert code == 0 and [x["name"] for x in json.loads(out)["methods"]][1] != "keydiff"


def test_keys_that_a_saved_prompt_overrides_are_no_mistake(run, tmp_path):
    saved = str(tmp_path / "s.safetensors")
    text = 'model = "demo"\nsnapkv = "top_k=8"\nsystem-prompt = "Answer."\nstore = "8bit"\n'
    assert run(text, "cache-prompt", "--prompt", LEAD * 4, "-o", saved)[0] == 0
    asked = ["generate", "--prompt-cache-file", saved, "-m", "2", "--prompt"]
    code, _, err = run(text, *asked, "Which code?")
    assert code == 0 and "note:" not in err
    code, _, err = run(text, *asked, f"{LEAD * 4}\n\nWhich code?")
    assert code == 0 and f"note: {saved} already holds this text" in err.replace("\n", " ")


def test_config_prints_each_setting_with_its_source_and_its_commands(run):
    code, out, err = run(FILE, "config", MLX_SNAPKV_STORE="memory", MLX_SNAPKV_MODEL="other")
    assert (code, err) == (0, "") and "secret" not in out
    said = dict(line.split(", from ") for line in out.splitlines())
    assert said["--model 'other'"].startswith("MLX_SNAPKV_MODEL: generate, chat, compare, batch, ")
    assert said["--store 'memory'"].startswith("MLX_SNAPKV_STORE: generate, ")
    assert "plan" not in said["--store 'memory'"]
    assert said["--memory '16GB'"].endswith("config.toml, [plan], memory: plan")
    assert said["--max-tokens 6"].endswith("config.toml, [generate], max-tokens: generate")
    assert said["--setting ['text', 'later']"].endswith("[eval.fidelity], setting: eval fidelity")
    assert said["--api-key (hidden)"].endswith("config.toml, api-key: serve")
    code, out, _ = run("", "config")
    assert code == 0 and "sets nothing" in out


@pytest.mark.parametrize(
    "text, words",
    [
        ('modle = "demo"', "FILE: unknown option modle (did you mean 'model'?)"),
        ("model = [1]", "FILE, model must be a value that --model takes, got [1]"),
        ("temp = 101", "FILE, temp must be from 0 to 100, got 101"),
        ('[generate]\nmax_tokens = "many"', "FILE, [generate], max-tokens: "),
        ('policy = "keydif"', "(--policy is from FILE, policy)"),
        ('model = "demo', "FILE: "),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_names_the_file_and_the_key(run, text, words):
    code, out, err = run(text, *ASK, "--model", "demo")
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err


def test_a_store_in_the_file_is_ignored_without_sparse_attention_and_a_flag_is_not(run):
    text = 'model = "demo"\nstore = "8bit"\n'
    assert run(text, *ASK, "-m", "2")[0] == 0
    code, _, err = run(text, *ASK, "-m", "2", "--policy", "tova")
    assert code == 0 and "memory" not in err.partition("|")[0]
    code, _, err = run(text, *ASK, "-m", "2", "--policy", "tova", "--store", "memory")
    assert code == 2 and "--store memory says where sparse attention keeps all entries" in err


def test_a_typed_store_overrides_the_store_in_the_file(run):
    text = 'model = "demo"\nstore = "8bit"\n[generate]\nsparse = "budget=9,n_window=1"\n'
    stores = {
        (): "8bit",
        ("--store", "file"): "file",
        ("--sparse", "budget=9,store=file"): "file",
    }
    for typed, store in stores.items():
        code, out, _ = run(text, *ASK, "-m", "2", *typed, "--json")
        assert code == 0
        assert f",store={store}" in json.loads(out)["compression"]["policy"]
    text = text.replace(
        "n_window=1", "n_window=1,store=memory"
    )  # a default, which a store replaces
    code, out, _ = run(text, *ASK, "-m", "2", "--json")
    assert code == 0 and ",store=8bit" in json.loads(out)["compression"]["policy"]


def test_a_store_in_the_file_waits_for_a_later_policy_of_a_chat(run):
    text = 'model = "demo"\nstore = "8bit"\n'
    lines = b"/policy\n/policy sparse:budget=9\n/policy tova"
    code, _, err = run(text, "chat", stdin=lines)
    assert code == 0 and "policy: none\n" in err
    assert "with policy sparse:budget=9,store=8bit\n" in err and "with policy tova\n" in err


def test_a_mistake_in_a_variable_names_it(run):
    _, _, err = run("", *ASK, "--model", "demo", MLX_SNAPKV_KV_BITS="5")
    assert err == "mlx-snapkv: MLX_SNAPKV_KV_BITS must be 2, 3, 4, 6 or 8, got '5'\n"


def test_a_variable_that_names_no_option_causes_a_warning(run):
    known = {
        "MLX_SNAPKV_API_KEY": "x",
        "MLX_SNAPKV_SPEED_RECORD": "x",
        "MLX_SNAPKV_REAL_MODELS": "x",
    }
    assert run("", "policies", **known)[2] == ""
    code, _, err = run("", "policies", MLX_SNAPKV_MODLE="demo")
    assert (code, err) == (0, "warning: MLX_SNAPKV_MODLE names no option (did you mean 'model'?)\n")
