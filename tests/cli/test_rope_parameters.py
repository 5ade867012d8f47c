"""Model folders whose config.json has the format of transformers 5."""

import json

import pytest
from model_folders import demo_with

from mlx_snapkv import SnapKVError
from mlx_snapkv.cli import loading

ROPE = {"rope_theta": 10_000_000.0, "rope_type": "default"}  # the built-in model's
NOTICE = (
    "rope_theta=10000000.0 from rope_parameters, which mlx-lm does not read for this model type"
)


@pytest.fixture
def folder(tmp_path):
    """Return a function that creates the built-in model's folder with the given rope_parameters and no rope_theta."""

    def make(values):
        made = demo_with(tmp_path / "model", rope_parameters=values)
        config = json.loads((made / "config.json").read_text())
        del config["rope_theta"]
        (made / "config.json").write_text(json.dumps(config))
        return str(made)

    return make


def test_the_answer_equals_the_models_answer_with_rope_theta(call, folder, text_file, tmp_path):
    text, facts = text_file(tmp_path / "text.txt", 700)
    asked = ["--prompt-file", str(text), "--prompt", facts[0].question, "-m", "12", "--model"]
    name = folder(ROPE)
    code, found, err = call("generate", *asked, name)
    assert (code, found.strip()) == (0, facts[0].value)
    assert err.splitlines()[0] == f"mlx-snapkv: --model {name}: {NOTICE}"
    _, found, err = call("generate", *asked, "demo", "--draft-model", name)
    assert found.strip() == facts[0].value and f"--draft-model {name}: {NOTICE}" in err


def test_rope_parameters_that_mlx_lm_does_not_know_are_refused_by_name(refused, folder):
    name = folder(ROPE | {"partial_rotary_factor": 0.5})
    for words in (["generate", "-p", "x"], ["serve"], ["plan", "--context", "1k"]):
        said = refused(*words, "--model", name)
        assert f"--model {name}: its config.json has rope_parameters" in said
        assert "mlx-lm's 'llama' does not read that and has no partial_rotary_factor" in said


def test_several_macs_need_a_plain_configuration(folder, monkeypatch):
    monkeypatch.setattr(loading, "_start_ranks", lambda pipeline: 2)
    with pytest.raises(
        SnapKVError,
        match=r"on several Macs mlx-lm does not read rope_parameters: add rope_theta to config\.json",
    ):
        loading.load_model(folder(ROPE), pipeline=False)


def test_plan_reads_rope_parameters_as_loading_does(call, folder):
    scaled = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
    code, out, err = call("plan", "--model", folder(scaled), "--context", "4k", "--json")
    assert (code, err) == (0, "") and json.loads(out)["trained_length"] == 65_536
