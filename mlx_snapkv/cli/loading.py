"""Models from what a user typed, and what is wrong with those that can't be loaded."""

import contextlib
import logging
import os
import secrets
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, cast

from ..demo import MODELS
from ..errors import SnapKVError, brief
from ..paths import path_of
from .command import flag_of
from .process import be_silent, listen

# The share of a machine's memory that weights made wider may take: entries get wider, too.
WEIGHTS = 0.5
INDEX = "model.safetensors.index.json"
# What mlx and mlx-lm say of a model that can't be split so.
UNSPLIT = ("does not support", "must be positive", "annot shard", "annot be sharded")
ALONE_ONLY = "start it without mlx.launch"

# What the errors of the Hugging Face hub mean.
HUB = {
    "LocalEntryNotFoundError": "the Hugging Face hub can't be reached, and the local cache does not hold it",
    "GatedRepoError": "the repository is gated: request access on its Hugging Face page, then run `hf auth login`",
    "RepositoryNotFoundError": "the Hugging Face hub has no such repository; for a private one run `hf auth login`",
    "HfHubHTTPError": "the Hugging Face hub failed",
}
# A tokenizer has one of these.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json"
)  # fmt: skip
# The step of mlx-lm's loader that failed, and what it was about.
LOADING_STEPS = {
    "load_tokenizer": "its tokenizer can't be read",
    "load_adapters": "the adapters don't fit",
    "load_weights": "its weights don't fit its config.json",
    "load_config": "its config.json does not describe such a model",
    "load_model": "its config.json does not describe such a model",
}


def load_model(
    name: str,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    option: str = "--model",
    quantize_activations: bool = False,
    pipeline: bool | None = None,
):
    """The model and tokenizer that mlx-lm loads for a folder, a hub repository or an embedded model's name.

    Of several processes that `mlx.launch` has started, each loads its shard; those but rank 0 print no more.

    Args:
        pipeline: each is to have some of the layers, not a slice of all; None is a command for one process.

    Raises: SnapKVError: nothing is there, or mlx-lm can't read it; the message says what was looked for.
    """
    import mlx.core as mx
    from mlx_lm import load

    from ..engine.wired_memory import hold_memory

    n_ranks = _joined(pipeline)
    require_alone(adapter_path=adapter_path, quantize_activations=quantize_activations)
    folder = _place(name, option)
    adapter = _adapter_folder(adapter_path)
    # It says that texts longer than the tokenizer's limit fail. They don't; commands warn of long prompts themselves.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    listen()
    where = str(folder) if os.path.exists(folder) else name  # which no file may be able to have
    code = {"trust_remote_code": trust_remote_code}
    options: Any = {"tokenizer_config": code, **code}
    try:
        changes = _rope_changes(where, f"{option} {name}")
        if n_ranks > 1:
            model, tokenizer = _load_shard(where, n_ranks, bool(pipeline), changes, **options)
        else:
            options["model_config"] = {"quantize_activations": quantize_activations, **changes}
            model, tokenizer, *_ = load(where, adapter_path=adapter, **options)
    except SnapKVError as error:
        raise SnapKVError("{} {}: {}", option, name, error) from error
    except Exception as error:  # whatever is wrong with the files, it is theirs to mend
        raise SnapKVError(f"{option} {name}: {_why(name, folder, error, 'loaded')}") from error
    # Several processes would each decide, and have to agree.
    if (n_ranks == 1 or name in MODELS) and (notice := _make_fast(name, model)):
        print(f"mlx-snapkv: {option} {name}: {notice}", file=sys.stderr)
    mx.eval(model.parameters())
    hold_memory(model)
    return model, tokenizer


def _adapter_folder(path: str | None) -> str | None:
    """Raises: SnapKVError: it holds no adapters."""
    if path is None:
        return None
    folder = path_of(path, "--adapter-path")
    if not (folder / "adapter_config.json").is_file():
        raise SnapKVError(f"--adapter-path {path}: no adapter_config.json there")
    return str(folder)


def _rope_changes(where: str, named: str) -> dict[str, Any]:
    """What of `rope_parameters` mlx-lm is to be given by the names that it reads, which is said on stderr.

    Raises: SnapKVError: it has no such names.
    """
    from mlx_lm.utils import load_config, snapshot_download

    from ..models.rope_parameters import taken_over

    is_here = os.path.exists(where)
    folder = where if is_here else snapshot_download(where, allow_patterns=["config.json"])
    rope = taken_over(load_config(Path(folder)))
    if rope.values:
        print(f"mlx-snapkv: {named}: {rope}", file=sys.stderr)
    return rope.changes


def _joined(pipeline: bool | None) -> int:
    """Return how many processes were started together. Those but rank 0 print nothing from here on.

    Raises: SnapKVError: the command is for one Mac, or `--pipeline` was given to one process.
    """
    import mlx.core as mx

    from ..models.distributed import from_first, n_ranks, rank

    n = n_ranks()
    if rank():
        be_silent()
    if n == 1 and pipeline:
        how = "start the command with mlx.launch, or drop it"
        raise SnapKVError(f"--pipeline is for several Macs: {how}")
    if n > 1 and pipeline is None:
        raise SnapKVError(f"mlx-snapkv {sys.argv[1]} does not run on several Macs: {ALONE_ONLY}")
    if n > 1:  # all ranks sample alike
        mx.random.seed(from_first(partial(secrets.randbits, 63)))
    return n


def require_alone(**options: Any) -> None:
    """Raises: SnapKVError: an option is given that several Macs can't serve, and this is one of several."""
    from ..models.distributed import n_ranks

    for name, value in options.items():
        if value and n_ranks() > 1:
            alone = f"{flag_of(name)} can't be used on several Macs"
            raise SnapKVError(f"{alone}: drop it, or {ALONE_ONLY}")


def _load_shard(
    folder: str, n_ranks: int, pipeline: bool, rope_changes: dict[str, Any], **options: Any
) -> tuple[Any, Any]:
    """This rank's shard of a model, and the tokenizer; SnapKVError if mlx-lm can't split it so, or change its RoPE."""
    import mlx.core as mx
    from mlx_lm.utils import sharded_load

    if rope_changes:
        raise SnapKVError(
            "on several Macs mlx-lm does not read rope_parameters: add rope_theta to config.json, or "
            f"{ALONE_ONLY}"
        )
    group: Any = {"pipeline_group" if pipeline else "tensor_group": mx.distributed.init()}
    try:
        model, tokenizer = sharded_load(folder, **group, **options)
    except FileNotFoundError as error:
        if not str(error.filename).endswith(INDEX):
            raise
        raise SnapKVError(
            f"--pipeline needs {INDEX}, which lists the layers' files: make it with mlx_lm.convert, or drop --pipeline"
        ) from error
    except ValueError as error:
        if not any(reason in str(error) for reason in UNSPLIT):
            raise
        other = f"{'drop' if pipeline else 'add'} --pipeline, or start fewer processes"
        raise SnapKVError(f"mlx-lm can't split this model ({brief(error)}): {other}") from error
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    n = getattr(args, "num_key_value_heads", None) or text.get("num_key_value_heads")
    if not pipeline and n and n % n_ranks:
        raise SnapKVError(
            f"{n} KV heads can't be split over {n_ranks} processes: start a number that divides {n}, or add --pipeline"
        )
    return model, tokenizer


def load_without_weights(name: str, for_mac: bool = False):
    """The same model from its configuration and its weights' headers alone; of the hub, no more is downloaded.

    `for_mac`: half precision stays, as where there is a GPU.
    """
    folder = _place(name, "--model")
    from mlx_lm.utils import hf_repo_to_path

    from ..planning.shapes import repository_without_weights, without_weights

    if not os.path.exists(folder):
        with contextlib.suppress(Exception):  # it is asked for below, if it is not here
            folder = hf_repo_to_path(name)
    try:
        there = os.path.exists(folder)
        model = without_weights(folder) if there else repository_without_weights(name)
    except SnapKVError as error:
        raise SnapKVError("--model {}: {}", name, error) from error
    except Exception as error:  # as above
        raise SnapKVError(f"--model {name}: {_why(name, folder, error, 'planned')}") from error
    if name in MODELS or not for_mac:
        _make_fast(name, model)
    return model


def _place(name: str, option: str) -> Path:
    """The folder that a name stands for, which need not be there; SnapKVError if it can't be a repository's, either."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    folder = MODELS.get(name) or path_of(name, option)
    if os.path.exists(folder):
        if not (folder / "config.json").is_file():
            raise SnapKVError(f"{option} {name}: not a model folder, since it has no config.json")
        return folder
    try:
        validate_repo_id(name if "/" in name else "")
    except HFValidationError as error:
        raise SnapKVError(
            f"{option} {name}: no such folder, and not a valid Hugging Face repository name; "
            f"embedded models: {', '.join(MODELS)}"
        ) from error
    return folder


def _make_fast(name: str, model: Any, memory: int | None = None) -> str:
    """Compute half precision in float32 without a GPU, if that many bytes allow it; what to say about it, if anything.

    MLX only emulates halves on a CPU, several times slower. `memory` is the whole machine's: what is free would change
    from run to run, and with it the answers and whether saved prompts fit.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from ..planning.machine import this_machine
    from ..planning.units import format_bytes

    weights = [x for _, x in cast(list, tree_flatten(model.parameters()))]
    halves = [x for x in weights if x.dtype in (mx.float16, mx.bfloat16)]
    if not halves or mx.default_device() != mx.Device(mx.cpu):
        return ""
    needed = sum(x.nbytes for x in [*weights, *halves])
    memory = this_machine().memory if memory is None else memory
    dtype = str(halves[0].dtype).removeprefix("mlx.core.")
    sizes = f"{format_bytes(needed)} of {format_bytes(memory)}"
    if name not in MODELS and needed > memory * WEIGHTS:
        return f"{dtype} is slow without a GPU, and in float32 the weights would take {sizes}"
    model.set_dtype(mx.float32)
    if name in MODELS:
        return ""
    return f"computing in float32, faster than {dtype} without a GPU; the weights take {sizes}"


def _why(name: str, folder: Path, error: Exception, done: str) -> str:
    if not folder.exists():
        from mlx_lm.utils import hf_repo_to_path

        for kind in type(error).__mro__:
            if kind.__name__ in HUB:
                return f"no such folder, and {HUB[kind.__name__]} ({brief(error)})"
        if done == "planned":
            return f"can't be planned: {brief(error)}"
        folder = hf_repo_to_path(name)
    return f"can't be {done}: {_fault(folder, error)}"


def _fault(folder: Path, error: Exception) -> str:
    from safetensors import SafetensorError, safe_open

    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        return "the folder has no weights (model.safetensors, or several model-*.safetensors)"
    for file in weights:
        try:
            safe_open(file, "np").keys()  # which is as long as its header says
        except (OSError, SafetensorError):
            return f"{file.name} is damaged or incomplete"
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    has_tokenizer = any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)
    if "load_tokenizer" in frames and not has_tokenizer:
        return "the folder has no tokenizer, such as tokenizer.json"
    step = next(
        (about for name, about in LOADING_STEPS.items() if name in frames), "mlx-lm can't load it"
    )
    return f"{step}: {brief(error)}"
