"""What `policies` and `models` list."""

import json
import re

import pytest

from mlx_snapkv import models
from mlx_snapkv.cli.listings import defaults
from mlx_snapkv.policies import POLICIES


def test_every_policy_its_paper_and_all_its_options_are_listed(call):
    code, out, err = call("policies")
    assert (code, err) == (0, "")
    pairs = out.splitlines()
    assert len(pairs) == 2 * len(POLICIES)
    for title, options, (name, cls) in zip(pairs[::2], pairs[1::2], POLICIES.items(), strict=True):
        assert title.startswith(f"{name}: {cls.summary}") and cls.paper in title
        assert [option.partition("=")[0] for option in options.split(",")] == [
            f"{'   ' * (i == 0)} {option}" for i, option in enumerate(cls.options())
        ]


@pytest.mark.parametrize("name", POLICIES)
def test_the_defaults_as_printed_make_the_default_policy(name):
    cls = POLICIES[name]
    text = ",".join(f"{option}={value}" for option, value in defaults(cls).items())
    assert cls.from_string(text) == cls()


def test_both_lists_of_models_are_printed(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call("models")
    assert code == 0 and set(models.SUPPORTED) | set(models.REFUSED) <= set(out.split())
    assert re.search(rf"\n mamba  .*{re.escape(models.REFUSED['mamba'])}", out)
    found = json.loads(call("models", "--json")[1])
    assert "llama" in {row["model_type"] for row in found["supported"]}
    assert all(row["why"] for row in found["refused"])
