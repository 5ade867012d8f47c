"""Importing the package or starting a command must not import MLX or mlx-lm before they are needed."""

import subprocess
import sys

SLOW = "{'mlx', 'mlx_lm', 'transformers', 'huggingface_hub', 'numpy', 'prompt_toolkit', 'rich'}"


def python(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mlx_lm_finds_our_caches_after_a_name_of_ours_is_imported():
    program = """
import sys
finders = [*sys.meta_path]
import mlx_snapkv
assert sys.meta_path == finders
from mlx_snapkv import prefill
from mlx_lm.models import cache
print(cache.SnapKVCache, cache.BlockKVCache)
"""
    assert "compress.window.SnapKVCache" in python(program)


def test_all_public_names_exist_and_import_nothing_slow_before_their_first_use():
    out = python(f"""
import sys, mlx_snapkv
assert not {SLOW} & set(sys.modules), {SLOW} & set(sys.modules)
assert mlx_snapkv.__version__ and "SnapKV" in dir(mlx_snapkv)
names = {{}}
exec("from mlx_snapkv import *", names)
assert set(mlx_snapkv.__all__) <= set(names)
assert all(getattr(mlx_snapkv, name) is names[name] for name in mlx_snapkv.__all__)
print(mlx_snapkv.saved.save.__name__, mlx_snapkv.errors.SnapKVError is names["SnapKVError"])
try:
    mlx_snapkv.nothing
except AttributeError as error:
    print(error)
""")
    assert out == "save True\nmodule 'mlx_snapkv' has no attribute 'nothing'\n"


def test_version_and_help_import_nothing_slow():
    python(f"""
import sys
from mlx_snapkv.__main__ import main
commands = ["generate", "chat", "batch", "cache-prompt", "inspect", "demo", "models", "policies", "bench", "eval"]
for arguments in (["--version"], ["--help"], *([name, "--help"] for name in commands), ["eval", "fidelity", "--help"]):
    sys.argv = ["mlx-snapkv", *arguments]
    try:
        main()
    except SystemExit as exit:
        assert exit.code == 0
    found = {SLOW} & set(sys.modules)
    assert not found, (arguments, found)
""")
