import sys

import fork_helpers
import pytest

from mlx_snapkv.cli.policies import defaults
from mlx_snapkv.policies import POLICIES


def run(*args):
    done = fork_helpers.run(
        [sys.executable, "-m", "mlx_snapkv", *args], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_every_policy_its_paper_and_all_its_options_are_listed():
    code, out, err = run("policies")
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


@pytest.mark.parametrize(
    "policy, words",
    [
        ("keydif", "unknown policy 'keydif' (did you mean 'keydiff'?)"),
        ("keydiff:budget=0", "budget must be a whole number of entries of at least 1"),
        ("keydiff:budget=64,n_window=100", "budget must be at least 100"),
        ("keydiff:block=0", "block must be a whole number of at least 1, got 0"),
        ("snapkv:mass=1.5", "mass must be a share above 0 and at most 1, got 1.5"),
        ("keydiff:anchr=mean", "did you mean 'anchor'?"),
        ("snapkv then keydiff", "only a policy with schedule=block can be followed"),
    ],
)
def test_a_mistake_is_one_line(policy, words):
    code, out, err = run("generate", "--model", "demo", "-p", "hello " * 300, "--policy", policy)
    assert (code, out) == (2, "") and words in err and len(err.strip().splitlines()) == 1
