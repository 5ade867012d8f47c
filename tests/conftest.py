"""Models for the tests: the built-in ones, loaded by mlx-lm, and small random ones of the real classes."""

import random

import mlx.core as mx
import pytest
from hypothesis import settings
from mlx_lm import load
from tiny_models import make_llama, make_qwen

from mlx_snapkv.compress.policies import lagkv
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack, question_prompt
from mlx_snapkv.planning.speed_record import PATH_VARIABLE

# Examples have no deadline, so that a slow machine does not fail them.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_collection_modifyitems(items):
    """Run the longest tests first, so that all workers finish at about the same time."""
    items.sort(key=lambda item: item.path.parent.name not in ("scripts", "several"))


@pytest.fixture(scope="session", autouse=True)
def no_settings(tmp_path_factory):
    """Hide the user's config.toml, and record no speeds unless a test sets a path for the record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATH_VARIABLE, "")
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return a path for a speed record. Neither the file nor its folder exists yet."""
    path = tmp_path / "cache" / "speed.json"
    monkeypatch.setenv(PATH_VARIABLE, str(path))
    return path


@pytest.fixture
def short_blocks(monkeypatch):
    """Make LagKV compare blocks of 8 entries, so that small prompts have several."""
    monkeypatch.setattr(lagkv, "LAG", 8)


def _load(name: str):
    model, tokenizer = load(str(MODELS[name]))
    model.set_dtype(mx.float32)  # a CPU computes it faster than bfloat16
    return model, tokenizer


@pytest.fixture(scope="session")
def demo_llama():
    return _load("demo")


@pytest.fixture(scope="session")
def demo_qwen():
    return _load("demo-qwen3-next")


@pytest.fixture(scope="session")
def demo_tasks():
    return _load("demo-tasks")


@pytest.fixture(scope="session", params=["demo_llama", "demo_qwen"])
def demo_model(request):
    """Return (model, tokenizer) of each built-in model, one per architecture."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=[make_llama, make_qwen])
def tiny_model(request):
    """Return a random LLaMA, and then a Qwen3-Next with linear layers and experts."""
    return request.param()


@pytest.fixture
def tokens():
    """Return 200 token ids below 64."""
    rng = random.Random(0)
    return mx.array([rng.randrange(64) for _ in range(200)])


@pytest.fixture
def path(tmp_path):
    """Return a path for a saved prompt."""
    return tmp_path / "book.safetensors"


@pytest.fixture(scope="session")
def ask():
    """Return a function that creates a document of `n_tokens` ending with a question, as (prompt ids, fact)."""

    def make(tokenizer, n_tokens: int, seed: int, n_facts: int = 4):
        document, facts = make_haystack(tokenizer, random.Random(seed), n_facts, n_tokens)
        return question_prompt(tokenizer, document, facts[0].question), facts[0]

    return make
